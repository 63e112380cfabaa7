import json

import pytest

from treeopt.errors import PromptError
from treeopt.prompts import evenly, prompts_hash, read_prompt_files, read_prompts


def written(tmp_path, text, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_text(text, encoding="utf8")
    return path


def test_json_lines_of_chats_are_read_with_domain_and_split(tmp_path):
    row = {"id": "a", "domain": "math", "split": "train", "messages": [{"role": "user", "content": "hi"}]}
    (prompt,) = read_prompts(written(tmp_path, json.dumps(row) + "\n\n"))
    assert (prompt.id, prompt.domain, prompt.split, prompt.reply) == ("a", "math", "train", None)
    assert prompt.messages == ({"role": "user", "content": "hi"},)


def test_sharegpt_conversations_end_in_the_reply(tmp_path):
    turns = [("system", "s"), ("human", "one"), ("gpt", "two"), ("human", "three"), ("gpt", "four")]
    rows = [{"id": "x", "conversations": [{"from": role, "value": text} for role, text in turns]}]
    (prompt,) = read_prompts(written(tmp_path, json.dumps(rows), "sharegpt.json"))
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.reply == "four"


def test_prompt_lines_and_plain_text_get_ids_of_their_own(tmp_path):
    lines = '{"prompt": "one", "completion": "two"}\n{"prompt": "a\u2028b"}\n'
    first, second = read_prompts(written(tmp_path, lines))
    assert (first.id, first.reply, second.id) == ("000001", "two", "000002")
    texts = read_prompts(written(tmp_path, "one\n\n two \n", "prompts.txt"))
    assert [prompt.messages[0]["content"] for prompt in texts] == ["one", "two"]


GOOD = '{"prompt": "fine"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON: .*; mend or delete it"),
        ("3", r"line 2 is int, not an object"),
        ("{}", r"line 2 has neither `messages` nor `conversations` nor a non-empty `prompt`"),
        ('{"prompt": "  "}', r"line 2 has neither"),
        ('{"messages": []}', r"line 2 has neither"),
        ('{"messages": [1]}', r"line 2, turn 1 is int"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2, turn 1 has role 'robot'"),
        ('{"messages": [{"role": "user", "content": ""}]}', r"line 2, turn 1 has no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2 has no user turn"),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}', r"no user turn"),
        ('{"prompt": "x", "split": "test"}', r"line 2: `split` is 'test'"),
        ('{"messages": [{"role": ["x"], "content": "y"}]}', r"line 2, turn 1 has role"),
        ('{"prompt": "\\ud800"}', r"line 2 holds half of a surrogate pair"),
        ("[" * 100_000, r"line 2 is nested too deeply"),
        ('{"prompt": "x", "domain": 3}', r"line 2: `domain` is 3"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path, line, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(written(tmp_path, GOOD + line + "\n"))


def test_repeated_ids_are_refused_within_and_across_files(tmp_path):
    row = '{"id": "a", "prompt": "x"}\n'
    with pytest.raises(PromptError, match=r"has id 'a' twice"):
        read_prompts(written(tmp_path, row + row))
    paths = [written(tmp_path, row, "one.jsonl"), written(tmp_path, row, "two.jsonl")]
    with pytest.raises(PromptError, match=r"has id 'a' twice"):
        read_prompt_files(paths)


def test_files_without_prompts_are_refused(tmp_path):
    with pytest.raises(PromptError, match=r"no prompts at all"):
        read_prompts(written(tmp_path, "\n"))
    with pytest.raises(PromptError, match=r"no prompts of split evaluation"):
        read_prompts(written(tmp_path, '{"prompt": "x", "split": "train"}'), split="evaluation")
    with pytest.raises(PromptError, match=r"No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match=r"not a list of conversations"):
        read_prompts(written(tmp_path, "{}", "sharegpt.json"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(PromptError, match=r"not UTF-8"):
        read_prompts(tmp_path / "binary.txt")


def test_prompts_without_a_split_belong_to_all(tmp_path):
    path = written(tmp_path, '{"prompt": "x"}\n{"prompt": "y", "split": "train"}\n')
    assert len(read_prompts(path, split="evaluation")) == 1
    assert len(read_prompts(path, split="train")) == 2


def test_the_hash_follows_content_and_order(tmp_path):
    prompts = read_prompts(written(tmp_path, '{"prompt": "x"}\n{"prompt": "y"}\n'))
    assert prompts_hash(prompts) == prompts_hash(list(prompts))
    assert prompts_hash(prompts) != prompts_hash(prompts[::-1])


def test_an_even_choice_spans_the_whole_file():
    assert evenly(list(range(10)), 3) == [0, 3, 6]
    assert evenly(list(range(2)), 5) == [0, 1]


def test_the_bundled_prompts_cover_eight_domains_in_every_split():
    from treeopt.bundled import DEMO_PROMPTS, calibration_path

    prompts = read_prompts(calibration_path(DEMO_PROMPTS))
    assert len(prompts) == 480
    for split, count in (("train", 42), ("calibration", 12), ("evaluation", 6)):
        domains = [prompt.domain for prompt in prompts if prompt.split == split]
        assert {domain: domains.count(domain) for domain in domains} == dict.fromkeys(
            ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), count
        )
