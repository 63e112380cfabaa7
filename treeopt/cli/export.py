"""treeopt export: a tree as another decoder's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.compare import read_any_tree
from treeopt.cli.engines import engine_of, set_option, settings_given
from treeopt.cli.options import kind_of

if TYPE_CHECKING:
    from treeopt.engines import Engine, Fitted, Settings
    from treeopt.tree import DraftTree

__all__ = ["export"]


@click.command()
@click.argument("tree", required=False, metavar="TREE")
@click.option("--to", "to", metavar="ENGINE", help="Whose form; --list shows them all.")
@click.option("--engine-version", metavar="V", help="Its version, to be told whether that still reads such files.")
@set_option
@click.option("--repair", is_flag=True, help="Change the tree where the engine could not take it; the cost is printed.")
@click.option("--list", "listed", is_flag=True, help="Show every engine, its versions and limits, and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --list: as JSON.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write; - writes it to stdout.")
def export(
    tree: str | None,
    to: str | None,
    engine_version: str | None,
    settings: tuple[str, ...],
    repair: bool,
    listed: bool,
    as_json: bool,
    output: str | None,
) -> None:
    """Write TREE in the form of another decoder.

    TREE is a tree file, a JSON list of paths, chain:K or dense:W,W. A tree that the engine would refuse, or read as
    another one, is refused here, with the node and the remedy; --repair mends it and prints what that costs in E[L].

    \b
    Examples:
        treeopt export --list
        treeopt export tree.json --to medusa -o choices.json
        treeopt export tree.json --to trtllm --set max_draft_len=63 --repair -o choices.json
        treeopt export tree.json --to flashinfer --set prefix_len=128 -o mask.json
    """
    if listed:
        click.echo(json.dumps(_rows()) if as_json else _table())
        return
    if as_json:
        raise click.UsageError("--json is that of --list; give both or neither")
    if tree is None or to is None or output is None:
        raise click.UsageError("a tree, --to ENGINE and -o FILE are needed; treeopt export --list shows the engines")
    _export(tree, engine_of(to), engine_version, settings_given(settings), repair, output)


def _export(
    tree: str, engine: Engine, version: str | None, given: Mapping[str, str], repair: bool, output: str
) -> None:
    from treeopt.engines import fit, write_engine_file

    if version is not None:
        engine.versions.check(engine.name, version)
    settings = engine.settings_of(given)
    draft, probabilities = _read(tree)
    fitted = fit(engine, draft, settings, repair=repair, probabilities=probabilities)
    summary = "\n".join(_summary(engine, fitted, settings))
    if output == "-":
        click.echo(summary, err=True)
        click.echo(engine.write(fitted.tree, settings), nl=False)
        return
    write_engine_file(engine, fitted.tree, settings, output)
    click.echo(summary)
    click.echo(f"written to {output}", err=True)


def _read(name: str) -> tuple[DraftTree, dict[tuple[int, ...], float] | None]:
    """Return a tree and, where known, the probability of each path."""
    from treeopt.document import read_tree
    from treeopt.optimize.priced import states_probabilities

    if name.startswith(("chain:", "dense:")) or kind_of(Path(name)) != "tree":
        return read_any_tree(name), None
    built = read_tree(name)
    known = states_probabilities(built)
    return built.tree, dict(zip(built.tree.paths, built.path_probabilities.tolist())) if known else None


def _summary(engine: Engine, fitted: Fitted, settings: Settings) -> list[str]:
    tree = fitted.tree
    nodes = tree.num_nodes if engine.counts_root else tree.num_nodes - 1
    root = {True: "root counted", False: "root not counted", None: "root not counted"}[engine.counts_root]
    value = fitted.expected_after
    expected = [f"E[L] {'at least ' if fitted.added else ''}{value:.4f}"] if value is not None else []
    lines = [", ".join([f"{engine.name}: {nodes} nodes ({root})", f"depth {tree.max_depth}", *expected])]
    if fitted.complaints:
        verb = "the form holds a part of the tree and" if engine.summarises else "repaired:"
        lines += [f"{verb} {fitted.cost}", *(f"because {complaint}" for complaint in fitted.complaints)]
    lines.append(f"read by {engine.reader}; versions: {engine.versions.text}")
    return lines + list(engine.notes(tree, settings))


def _rows() -> list[dict[str, Any]]:
    from treeopt.engines import engines

    return [
        {
            "engine": engine.name,
            "reader": engine.reader,
            "form": engine.form,
            "versions": engine.versions.text,
            "limits": _limits(engine),
            "counts_root": engine.counts_root,
            "holds": engine.holds,
            "imports": engine.read is not None,
            "settings": {setting.name: setting.help for setting in engine.settings},
            "required": [setting.name for setting in engine.settings if setting.required],
        }
        for engine in engines().values()
    ]


def _limits(engine: Engine) -> list[str]:
    """Return the rules of the default settings, and what other settings ask for."""
    rules = [rule.text for rule in engine.rules(engine.settings_of({}, writing=False))]
    return rules + [setting.limit for setting in engine.settings if setting.limit]


def _table() -> str:
    root = {True: "counted", False: "not counted", None: "no count in the file"}
    imports = {
        "tree": "yes",
        "structure": "yes: siblings ranked in their order",
        "number": "yes: the chain of that length",
        "shape": "no: the engine grows its own trees",
    }
    lines = []
    for row in _rows():
        optional = "; ".join(f"{name}: {text}" for name, text in row["settings"].items())
        lines += [
            f"{row['engine']}: {row['reader']}",
            f"    writes    {row['form']}",
            f"    versions  {row['versions']}",
            f"    limits    {'; '.join(row['limits']) or 'none'}",
            f"    root      {root[row['counts_root']]}",
            f"    import    {imports[row['holds']]}",
            *([f"    --set     {optional}"] if optional else []),
        ]
    return "\n".join(lines)
