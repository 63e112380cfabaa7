import pytest
import torch

from treeopt.calibrate.documents import Continuation
from treeopt.errors import PromptError, TargetError
from treeopt.prompts import Prompt
from treeopt.targets.loading import LoadedTarget
from treeopt.training.samples import Sample, conversations, held_out, labels_of, whole


def document(tokens, prompt=(1, 2)):
    return Continuation("x", None, tuple(prompt), tuple(tokens))


def test_head_h_is_taught_the_token_h_plus_two_after_its_hidden_state():
    # Row 0 reads the state that token 5 was decided from: the target's own guess is 5, head 0's is 6.
    assert labels_of(whole(document([5, 6, 7, 8])), 3).tolist() == [
        [5, 6, 7, 8],
        [6, 7, 8, -1],
        [7, 8, -1, -1],
        [8, -1, -1, -1],
    ]


def test_no_head_guesses_into_a_users_turn_or_over_one():
    learnt = (True, True, False, False, True, True)
    assert labels_of(Sample(document([5, 6, 7, 8, 9, 10]), learnt), 3).tolist() == [
        [5, 6, -1, -1],
        [6, -1, -1, -1],
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [9, 10, -1, -1],
        [10, -1, -1, -1],
    ]


def test_labels_equal_a_plain_restatement():
    torch.manual_seed(0)
    for _ in range(20):
        length, num_heads = int(torch.randint(1, 9, ())), int(torch.randint(1, 6, ()))
        tokens, learnt = torch.randint(0, 9, (length,)).tolist(), torch.rand(length).gt(0.3).tolist()
        labels = labels_of(Sample(document(tokens), tuple(learnt)), num_heads)
        for i in range(length):
            for ahead in range(1 + num_heads):
                seen = i + ahead < length and all(learnt[i : i + ahead + 1])
                assert labels[i, ahead] == (tokens[i + ahead] if seen else -1)


class Template:
    """A tokenizer of one token a word, whose chat template frames turns."""

    chat_template = "yes"
    FRAMES = {"user": [100], "assistant": [200], "system": [300]}  # noqa: RUF012

    def __init__(self, forgets=False):
        self.forgets = forgets

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        ids = []
        for message in messages:
            words = [] if self.forgets and message["role"] == "assistant" else self(message["content"])["input_ids"]
            ids += [*self.FRAMES[message["role"]], *words, 0]
        return {"input_ids": [*ids, 200]}


@pytest.fixture
def speaking(tiny_target, monkeypatch):
    monkeypatch.setattr(tiny_target.generation_config, "eos_token_id", 0)
    return lambda forgets=False: LoadedTarget("tiny", tiny_target, Template(forgets))


TURNS = (
    {"role": "user", "content": "1 2"},
    {"role": "assistant", "content": "3 4 5"},
    {"role": "user", "content": "6"},
)


def test_every_turn_of_the_assistants_is_learnt_and_none_of_the_users(speaking):
    (sample,) = conversations(speaking(), [Prompt("a", TURNS, reply="7 8")], max_new_tokens=50)
    assert sample.document.prompt == (100, 1, 2, 0, 200)
    assert sample.document.tokens == (3, 4, 5, 0, 100, 6, 0, 200, 7, 8, 0)
    assert sample.learnt == (*[True] * 4, *[False] * 4, *[True] * 3)


def test_turns_are_cut_one_by_one(speaking):
    (sample,) = conversations(speaking(), [Prompt("a", TURNS, reply="7 8")], max_new_tokens=2)
    assert sample.document.tokens == (3, 4, 5, 0, 100, 6, 0, 200, 7, 8)
    assert sample.learnt == (True, True, *[False] * 6, True, True)


def test_a_turn_that_the_template_does_not_repeat_is_read_and_not_learnt(speaking):
    (sample,) = conversations(speaking(forgets=True), [Prompt("a", TURNS, reply="7 8")], max_new_tokens=50)
    assert sample.document.tokens == (7, 8, 0)
    assert all(sample.learnt)


def test_a_prompt_without_a_reply_is_named(speaking):
    with pytest.raises(PromptError, match=r"prompt `a` has no reply to learn"):
        conversations(speaking(), [Prompt("a", TURNS)], max_new_tokens=50)


def test_one_document_in_thirty_two_measures():
    samples = [whole(document([i, i])) for i in range(70)]
    learnt, measuring = held_out(samples)
    assert [sample.document.tokens[0] for sample in measuring] == [0, 32, 64]
    assert len(learnt) == 67


def test_a_document_without_tokens_has_no_labels():
    assert labels_of(whole(document([])), 3).shape == (0, 4)


def test_tokens_that_heads_have_no_column_for_are_not_theirs_to_guess():
    assert labels_of(whole(document([5, 9, 6, 8])), 2, 9).tolist() == [[5, -1, 6], [9, 6, 8], [6, 8, -1], [8, -1, -1]]


@pytest.mark.parametrize(("words", "reply"), [("1 2", ""), ("", "1 2")])
def test_a_prompt_or_reply_without_tokens_is_named(speaking, monkeypatch, words, reply):
    target = speaking()
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(Template, "chat_template", None)
    turns = ({"role": "user", "content": words},)
    with pytest.raises(PromptError, match=r"prompt `a` or its reply has no tokens"):
        conversations(target, [Prompt("a", turns, reply=reply)], max_new_tokens=50)


def test_what_the_assistant_says_before_anything_is_read_is_not_learnt(speaking, monkeypatch):
    # Without a template an opening without turns is a line end, that may have no token.
    monkeypatch.setattr(Template, "chat_template", None)
    turns = ({"role": "assistant", "content": "1 2"}, {"role": "user", "content": "0 6"})
    (sample,) = conversations(speaking(), [Prompt("a", turns, reply="7 8")], max_new_tokens=50)
    assert sample.document.prompt == (1, 2, 0, 6)
    assert sample.document.tokens == (7, 8, 0)


class Strict(Template):
    """A template that closes turns with 9 and takes no system turn; the tokenizer's own end is 5."""

    eos_token_id = 5

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        if any(message["role"] == "system" for message in messages):
            raise RuntimeError("system role not supported\nat line 1")
        ids = []
        for message in messages:
            ids += [*self.FRAMES[message["role"]], *self(message["content"])["input_ids"], 9]
        return {"input_ids": [*ids, *([200] if add_generation_prompt else [])]}

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split() if word.isdigit()]}


def test_of_several_ends_a_reply_has_the_one_that_the_template_writes(tiny_target, monkeypatch):
    # As with Llama 3 and Qwen 2, whose first end-of-sequence token no template writes.
    target = LoadedTarget("tiny", tiny_target, Strict())
    monkeypatch.setattr(tiny_target.generation_config, "eos_token_id", [3, 5, 9])
    (sample,) = conversations(target, [Prompt("a", TURNS, reply="7 8")], max_new_tokens=50)
    assert sample.document.tokens == (3, 4, 5, 9, 100, 6, 9, 200, 7, 8, 9)
    assert sample.learnt == (*[True] * 4, *[False] * 4, *[True] * 3)  # the earlier turn is seen as what it is
    without = Strict()
    without.chat_template = None
    assert LoadedTarget("tiny", tiny_target, without).reply_ids("7 8") == [7, 8, 5]
    monkeypatch.setattr(tiny_target.generation_config, "eos_token_id", [2, 3])
    assert LoadedTarget("tiny", tiny_target, without).reply_ids("7 8") == [7, 8, 2]


def test_what_a_template_refuses_is_said_in_one_line(tiny_target):
    turns = ({"role": "system", "content": "1"}, {"role": "user", "content": "2"})
    with pytest.raises(
        TargetError, match=r"`tiny` refuses a prompt with turns of system, user \(.*not supported\); leave"
    ):
        LoadedTarget("tiny", tiny_target, Strict()).prompt_ids(turns)
