import pytest
import torch

from treeopt.calibrate.documents import Continuation
from treeopt.errors import PromptError
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
