"""What treeopt train is given: recipes, prompts and places that are not as they should be; one line each."""

import errno
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from transformers import integrations

from treeopt.training import reporting

SHORT = ["--max-new-tokens", 6, "--num-heads", 2, "--epochs", 1]


@pytest.fixture
def models(tiny_directory, tiny_prompts):
    return ["--target", tiny_directory, "--prompts", tiny_prompts, *SHORT]


def one_line(result, status=1):
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit)  # no traceback
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: ")
    return line


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("epochs", 2.7, "a whole number"),
        ("epochs", True, "a whole number"),
        ("epochs", None, "a whole number"),
        ("seed", None, "a whole number"),
        ("limit", [3], "a whole number"),
        ("learning_rate", True, "a number"),
        ("learning_rate", None, "a number"),
        ("distill", 3, "true or false"),
        ("distill", "yes", "true or false"),
        ("distill", None, "true or false"),
        ("prompts", "p.jsonl", "a list of strings"),
        ("prompts", [3], "a list of strings"),
        ("prompts", {"a": 1}, "a list of strings"),
        ("lora_modules", "q_proj", "a list of strings"),
        ("target", 5, "a string"),
        ("target", ["a"], "a string"),
        ("device_map", {"": "cpu"}, "a string"),
    ],
)
def test_a_recipe_says_what_its_values_are(run, name, value, wanted):
    Path("recipe.json").write_text(json.dumps({"schema": "treeopt.recipe/1", name: value}))
    line = one_line(run("train", "--recipe", "recipe.json", "-o", "out"))
    assert line.endswith(f"`recipe.json`: `{name}` is {json.dumps(value)}; give {wanted}")


@pytest.mark.parametrize(("name", "code"), [("epochs", 1), ("learning_rate", 2)])
def test_numbers_beyond_all_floats_are_refused_in_a_recipe(run, name, code):
    Path("recipe.json").write_text(f'{{"schema": "treeopt.recipe/1", "{name}": 1e999}}')
    result = run("train", "--recipe", "recipe.json", "-o", "out")
    assert result.exit_code == code
    assert name.replace("_", "-") in result.stderr


@pytest.mark.parametrize("name", ["o", "h", "help", "prompt_files", "num-heads"])
def test_a_recipe_holds_options_by_their_long_names(run, name):
    Path("recipe.json").write_text(json.dumps({"schema": "treeopt.recipe/1", name: "x"}))
    assert f"`{name}` is no option" in one_line(run("train", "--recipe", "recipe.json", "-o", "out"))


def test_whole_numbers_may_be_written_as_strings_or_with_a_point(run, models):
    Path("recipe.json").write_text(json.dumps({"schema": "treeopt.recipe/1", "warmup_steps": 2.0, "accumulate": "3"}))
    assert run("train", "--recipe", "recipe.json", *models, "-o", "out").exit_code == 0
    recipe = json.loads(Path("out/training.jsonl").read_text().splitlines()[0])["recipe"]
    assert (recipe["warmup_steps"], recipe["accumulate"]) == (2, 3)


def test_no_dropout_is_nan(run, models):
    result = run("train", *models, "--method", "medusa-2", "--lora-dropout", "nan", "-o", "out")
    assert "nan is no rate" in one_line(result, 2)


def test_a_reporter_that_is_not_there_is_named_before_anything_is_generated(run, models, monkeypatch):
    line = one_line(run("train", *models, "--report-to", "nonsense", "-o", "out"))
    assert "`--report-to nonsense` cannot be used: nonsense is not supported" in line

    class Missing:
        def __init__(self):
            raise RuntimeError("needs a package\nthat is not installed")

    monkeypatch.setattr(reporting, "get_reporting_integration_callbacks", lambda names: [Missing])
    line = one_line(run("train", *models, "--report-to", "tensorboard", "-o", "out"))
    assert line.endswith("`--report-to tensorboard` cannot be used: needs a package")
    assert not Path("out.partial").exists()


def test_what_a_reporter_wrote_stays(run, models, monkeypatch):
    from transformers import TrainerCallback

    class Writing(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            (Path(args.output_dir) / "runs").mkdir(parents=True)
            (Path(args.output_dir) / "runs" / "events").write_text("x")

    for module in (reporting, integrations):
        monkeypatch.setattr(module, "get_reporting_integration_callbacks", lambda names: [Writing])
    import transformers.trainer as trainer_module

    monkeypatch.setattr(trainer_module, "get_reporting_integration_callbacks", lambda names: [Writing])
    assert run("train", *models, "--report-to", "tensorboard", "-o", "out").exit_code == 0
    assert sorted(path.name for path in Path("out.partial").rglob("*")) == [
        "continuations.jsonl",
        "events",
        "heads",
        "runs",
    ]


def test_a_directory_that_cannot_be_written_is_refused_before_the_training(run, models, monkeypatch):
    Path("out").mkdir()

    def refused(**_):
        raise PermissionError(errno.EACCES, "Permission denied", "out")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert "`out`: Permission denied" in one_line(run("train", *models, "-o", "out"))
    assert not Path("out.partial").exists()


def test_an_output_of_another_file_system_gets_its_target(run, models, monkeypatch):
    # The target is written within the output: a rename from anywhere else may not be possible.
    replace = Path.replace

    def within(path, other):
        if (
            Path("out").resolve() in Path(other).resolve().parents
            and Path("out").resolve() not in path.resolve().parents
        ):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        return replace(path, other)

    monkeypatch.setattr(Path, "replace", within)
    result = run("train", *models, "--method", "medusa-2", "--lora-rank", 2, "-o", "out")
    assert result.exit_code == 0, result.output
    assert Path("out/target/model.safetensors").is_file()
    assert not Path("out/.target.part").exists()


def prompts(rows):
    Path("prompts.jsonl").write_text("".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(rows)))
    return ["--prompts", "prompts.jsonl", "--continuations", "dataset"]


USER, ASSISTANT = ({"role": role, "content": "1 2 3"} for role in ("user", "assistant"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1 2", "completion": ""}, "prompt `0` or its reply has no tokens"),
        ({"prompt": "1 2", "completion": "5"}, "heads have nothing to guess"),
        ({"prompt": "1 2"}, "prompt `0` has no reply to learn"),
        ({"messages": [ASSISTANT]}, "has no user turn before the reply"),
    ],
)
def test_prompts_with_nothing_to_learn_are_named(run, tiny_directory, row, message):
    given = prompts([row] * 4)
    assert message in one_line(run("train", "--target", tiny_directory, *SHORT, *given, "-o", "out"))


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"])
def test_an_assistant_may_speak_first(run, tiny_directory, tmp_path, template):
    target = tmp_path / "own"
    shutil.copytree(tiny_directory, target)
    if template:
        (target / "chat_template.jinja").write_text(template)
    given = prompts([{"messages": [ASSISTANT, USER, ASSISTANT]}] * 4)
    result = run("train", "--target", target, *SHORT, *given, "-o", "out")
    assert result.exit_code == 0, result.output
    assert "4 documents, 12 tokens" in result.stdout


def test_a_template_that_refuses_a_prompt_is_named(run, tiny_directory, tmp_path):
    target = tmp_path / "own"
    shutil.copytree(tiny_directory, target)
    (target / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    given = prompts([{"messages": [USER, ASSISTANT]}] * 4)
    for more in (given, given[:2]):
        line = one_line(run("train", "--target", target, *SHORT, *more, "-o", "out"))
        assert "refuses a prompt with turns of user" in line
        assert "roles must alternate" in line
