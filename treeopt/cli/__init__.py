"""The command line: one module a command, each importing what it needs when it runs."""

from __future__ import annotations

import errno
from typing import Any

import click

from treeopt.cli.build import build
from treeopt.cli.calibrate import calibrate
from treeopt.cli.check import check
from treeopt.cli.compare import compare
from treeopt.cli.explain import explain
from treeopt.cli.export import export
from treeopt.cli.heads import heads
from treeopt.cli.import_ import import_
from treeopt.cli.plot import plot
from treeopt.cli.profile import profile
from treeopt.cli.report import report
from treeopt.cli.show import show
from treeopt.cli.trace import trace
from treeopt.cli.train import train
from treeopt.cli.verify import verify
from treeopt.errors import OtherProcessError, TreeoptError
from treeopt.version import __version__

__all__ = ["main"]


RESUMABLE = ("calibrate", "profile", "train")


class _Group(click.Group):
    """Errors that treeopt raises on purpose become one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OtherProcessError:
            raise SystemExit(1) from None  # one line is enough: the process that failed says why
        except TreeoptError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            # A closed pipe is the reader's choice, and click ends quietly on it.
            if error.errno == errno.EPIPE:
                raise
            where = f"`{error.filename}`: " if error.filename else ""
            raise click.ClickException(f"{where}{error.strerror or error}") from error
        except KeyboardInterrupt:
            resumes = ctx.invoked_subcommand in RESUMABLE
            click.echo("interrupted" + (": run the same command again to go on from here" if resumes else ""), err=True)
            raise SystemExit(130) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="treeopt")
def main() -> None:
    """Find the draft tree for your model, your data and your machine, and prove it.

    \b
    Start with the bundled demo target:
        treeopt calibrate
        treeopt build --nodes 64
        treeopt verify tree.json --limit 4
    """


for _command in (
    calibrate, build, verify, show, check, export, import_, compare, profile, explain, plot, report, train, heads, trace,
):  # fmt: skip
    main.add_command(_command)
