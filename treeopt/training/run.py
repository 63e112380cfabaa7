"""A whole training: heads on a frozen target, and then, with Medusa-2, both together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from treeopt.calibrate.processes import Processes
from treeopt.errors import HeadsError, first_line
from treeopt.files import replacing
from treeopt.heads.medusa import MedusaHeads
from treeopt.targets.loading import LoadedTarget, fingerprint
from treeopt.training.backbone import Backbone, backbone_of, require_trainable
from treeopt.training.heads_stage import HeadsAlone, PositionBatches
from treeopt.training.joint_stage import DocumentBatches, Together
from treeopt.training.measuring import Measure, Speech, as_served, measure, speech
from treeopt.training.samples import Sample, held_out, samples_hash
from treeopt.training.settings import JointSettings, TrainingSettings
from treeopt.training.trainer import Group, Stage, run_stage

__all__ = ["Trained", "train"]

Log = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training gives.

    Attributes
    ----------
    heads : MedusaHeads
        In the target's dtype.
    target : PreTrainedModel or None
        The merged target of Medusa-2, in the dtype that it was given in.
    measures : dict of str to Measure
        The heads on held-out documents after each stage: heads, joint.
    speech : dict of str to Speech
        The target on held-out documents, before and after; empty for Medusa-1.
    log : list of dict
        Losses, rates and measures by stage and step.
    """

    heads: MedusaHeads
    target: PreTrainedModel | None
    measures: dict[str, Measure]
    speech: dict[str, Speech]
    log: Log


def train(
    target: LoadedTarget,
    samples: Sequence[Sample],
    settings: TrainingSettings,
    work: Path,
    *,
    joint: JointSettings | None = None,
    heads: MedusaHeads | None = None,
    processes: Processes | None = None,
) -> Trained:
    """Train heads, or heads and target; go on from `work` if an interrupted run left something there.

    Parameters
    ----------
    target : LoadedTarget
        Not changed by Medusa-1; spent by Medusa-2, whose result holds the trained one.
    samples : sequence of Sample
        One in 32 measures and is not learnt.
    settings : TrainingSettings
        Of the heads alone.
    work : Path
        Folder for checkpoints, written as often as a twentieth of the time allows.
    joint : JointSettings, optional
        Of target and heads together: Medusa-2. Without it Medusa-1.
    heads : MedusaHeads, optional
        Trained further; fresh ones by default.
    processes : Processes, optional
        The processes of the run, each calling this with equal arguments within `joined`; this one alone by default.

    Raises
    ------
    HeadsError
        If there are too few documents, heads guess in a vocabulary of their own, or `work` belongs to another run.
    TargetError, MissingExtraError
        If the target cannot be trained, see `require_trainable`.
    """
    processes = processes or Processes()
    target.model.requires_grad_(False)
    learnt, measuring = held_out(samples)
    if not learnt:
        raise HeadsError(f"`{len(samples)}` documents are too few to train on; give at least 2 prompts")
    _require_own_ids(samples)
    trained = _starting_heads(target, settings, heads)
    if joint is not None:  # what cannot be trained is refused before the heads are
        require_trainable(target.model, joint)
        DocumentBatches(target.model, learnt, joint, trained.num_heads, settings.seed)
    _require_same_run(work, _header(target, samples, settings, joint, heads, processes), processes)
    run = _Run(target, learnt, measuring, settings, work, processes)
    log = run.heads_alone(trained) if settings.epochs else []
    measures = {"heads": measure(target.model, trained, measuring)}
    if joint is None:
        return Trained(as_served(trained, target.model), None, measures, {}, log)
    before = speech(target.model, measuring)
    backbone = backbone_of(target.model, joint, settings.seed)
    log += run.together(trained, backbone, joint)
    merged = backbone.merged().eval()
    measures["joint"] = measure(merged, trained, measuring)
    spoken = {"before": before, "after": speech(merged, measuring)}
    return Trained(as_served(trained, merged), merged, measures, spoken, log)


class _Run:
    """What both stages share."""

    def __init__(
        self,
        target: LoadedTarget,
        learnt: Sequence[Sample],
        measuring: Sequence[Sample],
        settings: TrainingSettings,
        work: Path,
        processes: Processes,
    ) -> None:
        self.target, self.learnt, self.measuring = target, learnt, measuring
        self.settings, self.work, self.processes = settings, work, processes
        self.tokens = sum(len(sample.document.tokens) for sample in learnt)

    def heads_alone(self, heads: MedusaHeads) -> Log:
        """Train heads in place, or take what an earlier run made of them."""
        result, log_file = self.work / "heads.safetensors", self.work / "heads.json"
        if result.is_file():
            try:
                heads.load_state_dict(load_file(result))
                log: Log = json.loads(log_file.read_text(encoding="utf8"))
            except Exception as error:  # two formats, without a common error
                raise HeadsError(
                    f"`{result}` or the log beside it is damaged ({first_line(error)}); delete it to go on from the last "
                    "checkpoint"
                ) from error
            return log
        items = PositionBatches(
            self.target, self.learnt, self.settings, heads.num_heads, self.processes.size, heads.vocabulary
        )
        stage = self._stage(
            self.settings,
            label="training heads",
            module=HeadsAlone(heads),
            groups=[Group(list(heads.parameters()), self.settings.learning_rate)],
            items=items,
            folder=self.work / "heads",
            measure=lambda: measure(self.target.model, heads, self.measuring),
        )
        log = [{"stage": "heads", **entry} for entry in run_stage(stage)]
        if self.processes.rank == 0:
            with replacing(log_file) as temporary:
                temporary.write_text(json.dumps(log), encoding="utf8")
            with replacing(result) as temporary:
                save_file(heads.state_dict(), temporary)
        self.processes.meet()
        return log

    def together(self, heads: MedusaHeads, backbone: Backbone, joint: JointSettings) -> Log:
        """Train heads and target in place."""
        target, module = backbone.target, Together(backbone, heads, joint)
        stage = self._stage(
            joint,
            label="training target and heads",
            module=module,
            groups=[
                Group([p for p in target.parameters() if p.requires_grad], joint.learning_rate),
                Group(list(heads.parameters()), joint.learning_rate * joint.heads_rate),
            ],
            items=DocumentBatches(target, self.learnt, joint, heads.num_heads, self.settings.seed, heads.vocabulary),
            folder=self.work / "joint",
            measure=lambda: measure(target, heads, self.measuring),
            advance=module.advance,
        )
        return [{"stage": "joint", **entry} for entry in run_stage(stage)]

    def _stage(self, own: TrainingSettings | JointSettings, **parts: Any) -> Stage:
        """Return a stage of these parts, the rest of it as its own and the common settings say."""
        return Stage(
            tokens=self.tokens * own.epochs,
            accumulate=own.accumulate,
            warmup_steps=own.warmup_steps,
            weight_decay=own.weight_decay,
            mixed_precision=self.settings.mixed_precision,
            seed=self.settings.seed,
            report_to=self.settings.report_to,
            device=self.target.model.device,
            **parts,
        )


def _require_own_ids(samples: Sequence[Sample]) -> None:
    """Refuse documents of one id: states and measures are kept by it."""
    seen: set[str] = set()
    for sample in samples:
        if (name := sample.document.prompt_id) in seen:
            raise HeadsError(f"two documents have the id {name!r}; give each its own")
        seen.add(name)


def _starting_heads(target: LoadedTarget, settings: TrainingSettings, given: MedusaHeads | None) -> MedusaHeads:
    if given is None:
        heads = MedusaHeads.for_target(
            target.model, settings.num_heads, settings.num_layers, own_lm_heads=settings.own_lm_heads
        )
    elif given.columns.ids is not None:
        raise HeadsError(
            "heads with a draft vocabulary of their own cannot be trained further; give heads of the target's"
        )
    else:
        heads = as_served(given, target.model)
    return heads.float().train().requires_grad_(True)


def _header(
    target: LoadedTarget,
    samples: Sequence[Sample],
    settings: TrainingSettings,
    joint: JointSettings | None,
    heads: MedusaHeads | None,
    processes: Processes,
) -> dict[str, Any]:
    """Return what decides a run: one with another header is another run."""
    return {
        **{name: value for name, value in asdict(settings).items() if name != "report_to"},
        "joint": None if joint is None else {**asdict(joint), "lora_modules": list(joint.lora_modules)},
        "heads": None if heads is None else fingerprint(heads),
        "target": fingerprint(target.model),
        "documents": samples_hash(samples),
        "processes": processes.size,
    }


def _require_same_run(work: Path, header: dict[str, Any], processes: Processes) -> None:
    path = work / "training.json"
    stated: Any = None
    if path.is_file():
        try:
            stated = dict(json.loads(path.read_bytes()))
        except (ValueError, TypeError) as error:
            raise HeadsError(f"`{path}` is damaged; delete `{work}` to start anew") from error
    if stated is not None and stated != header:
        differing = sorted(key for key in header if stated.get(key) != header[key])
        raise HeadsError(f"`{work}` was left by a run with another {', '.join(differing)}; delete it to start anew")
    processes.meet()
    if processes.rank == 0 and stated is None:
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(header), encoding="utf8")
