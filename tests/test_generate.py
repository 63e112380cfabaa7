import functools
import itertools

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

import treeopt
from treeopt import DraftTree, best_tree, dense_tree
from treeopt.errors import TargetError
from treeopt.verify import TreeVerifier
from treeopt.verify.sampling import Sample
from treeopt.verify.typical import Typical

TREE = dense_tree([3, 2])
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def generated(target, heads, ids=PROMPT, **keywords):
    keywords = {"max_new_tokens": 22, "do_sample": False, "attention_mask": torch.ones_like(ids)} | keywords
    return target.generate(ids, custom_generate=treeopt.decode, tree=TREE, heads=heads, **keywords)


def plain(target, ids=PROMPT, **keywords):
    keywords = {"max_new_tokens": 22, "do_sample": False, "attention_mask": torch.ones_like(ids)} | keywords
    return target.generate(ids, **keywords)


def test_generate_with_the_tree_gives_what_generate_gives(tiny_target, tiny_heads):
    assert torch.equal(generated(tiny_target, tiny_heads), plain(tiny_target))


def test_a_padded_batch_gives_what_generate_gives(tiny_target, tiny_heads):
    ids, mask = torch.tensor([[0, 0, 3, 1], [9, 2, 6, 5]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = plain(tiny_target, ids, attention_mask=mask, pad_token_id=0)
    assert torch.equal(generated(tiny_target, tiny_heads, ids, attention_mask=mask, pad_token_id=0), expected)


@pytest.mark.parametrize(
    "keywords",
    [
        {"repetition_penalty": 9.0},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[9], [6, 2]]},
        {"suppress_tokens": [2, 5, 11]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "max_new_tokens": 33},
    ],
    ids=str,
)
def test_processors_act_as_in_generate(tiny_target, tiny_heads, keywords):
    expected = plain(tiny_target, **keywords)
    assert not torch.equal(expected, plain(tiny_target, max_new_tokens=keywords.get("max_new_tokens", 22)))
    assert torch.equal(generated(tiny_target, tiny_heads, **keywords), expected)


class StopAtPair(StoppingCriteria):
    """Stops behind two given tokens in a row."""

    def __init__(self, pair):
        self.pair = pair

    def __call__(self, input_ids, scores, **_):
        return torch.tensor([row[-2:].tolist() == self.pair for row in input_ids])


def test_stopping_criteria_end_the_text_at_the_very_token(tiny_target, tiny_heads):
    whole = plain(tiny_target)[0]
    for end in range(7, 20):
        criteria = StoppingCriteriaList([StopAtPair(whole[end - 1 : end + 1].tolist())])
        expected = plain(tiny_target, stopping_criteria=criteria)
        assert torch.equal(generated(tiny_target, tiny_heads, stopping_criteria=criteria), expected)


def test_an_end_of_sequence_inside_an_accepted_path_ends_the_text(tiny_target, tiny_heads):
    tokens = plain(tiny_target)[0, 5:].tolist()
    for eos in sorted(set(tokens)):
        keywords = {"eos_token_id": eos, "pad_token_id": 0}
        expected = plain(tiny_target, **keywords)
        assert torch.equal(generated(tiny_target, tiny_heads, **keywords), expected)


class Heard:
    def __init__(self):
        self.tokens, self.calls, self.ended = [], 0, False

    def put(self, value):
        self.tokens.extend(value.reshape(-1).tolist())
        self.calls += 1

    def end(self):
        self.ended = True


@pytest.mark.parametrize("way", ["generate", "partial", "alone"])
def test_a_streamer_hears_prompt_and_tokens_as_they_are_decided(tiny_target, tiny_heads, way):
    streamer = Heard()
    if way == "generate":
        output = generated(tiny_target, tiny_heads, streamer=streamer)
    elif way == "partial":
        decode = functools.partial(treeopt.decode, tree=TREE, heads=tiny_heads)
        output = tiny_target.generate(PROMPT, custom_generate=decode, max_new_tokens=22, streamer=streamer)
    else:
        output = treeopt.decode(tiny_target, PROMPT, tree=TREE, heads=tiny_heads, max_new_tokens=22, streamer=streamer)
    assert streamer.tokens == output[0].tolist()
    assert streamer.ended
    assert 3 < streamer.calls < 24  # a call for the prompt, one for its first token, one a step


def test_a_batch_cannot_be_streamed_and_beams_are_refused(tiny_target, tiny_heads):
    with pytest.raises(TargetError, match=r"a streamer takes one prompt, not a batch of 2"):
        treeopt.decode(tiny_target, PROMPT.repeat(2, 1), tree=TREE, heads=tiny_heads, streamer=Heard())
    with pytest.raises(TargetError, match=r"`num_beams` is 3; tree decoding follows one sequence a prompt"):
        generated(tiny_target, tiny_heads, num_beams=3)


def test_sampling_through_generate_equals_plain_sampling_of_one_seed(tiny_target, tiny_heads):
    """One draw a token in the same order: the very text that `generate` samples, in fewer passes."""
    for seed in range(5):
        keywords = {"do_sample": True, "temperature": 0.8, "top_k": 6, "top_p": 0.9}
        torch.manual_seed(seed)
        expected = plain(tiny_target, **keywords)
        torch.manual_seed(seed)
        assert torch.equal(generated(tiny_target, tiny_heads, **keywords), expected)


def test_several_sequences_of_a_prompt_are_sampled(tiny_target, tiny_heads):
    output = generated(tiny_target, tiny_heads, do_sample=True, temperature=2.0, num_return_sequences=3)
    assert output.shape == (3, 27)
    assert len(output.unique(dim=0)) > 1


def test_a_dictionary_is_returned_where_one_is_asked_for(tiny_target, tiny_heads):
    output = generated(tiny_target, tiny_heads, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(tiny_target))


def test_decode_stands_alone_and_takes_files(tiny_target, tiny_heads, tiny_heads_directory, tmp_path):
    built = best_tree(treeopt.AcceptanceTable.from_rates([[0.6, 0.2], [0.5, 0.1]]), num_nodes=5)
    treeopt.write_tree(built, tmp_path / "tree.json")
    expected = plain(tiny_target, max_new_tokens=12)
    for tree, heads in [(tmp_path / "tree.json", tiny_heads_directory), (built, tiny_heads), (built.tree, tiny_heads)]:
        assert torch.equal(treeopt.decode(tiny_target, PROMPT, tree=tree, heads=heads, max_new_tokens=12), expected)


def test_the_length_comes_from_the_configuration_where_none_is_given(tiny_target, tiny_heads):
    decode = functools.partial(treeopt.decode, tiny_target, PROMPT, tree=TREE, heads=tiny_heads)
    assert decode().shape[1] == 5 + 64
    assert decode(generation_config=GenerationConfig(max_new_tokens=7)).shape[1] == 12
    assert decode(generation_config=GenerationConfig(max_length=9)).shape[1] == 9


@pytest.mark.parametrize("acceptance", [Typical(seed=1), Sample(0.7, seed=1)], ids=lambda rule: rule.name)
def test_other_rules_decode_through_generate(tiny_target, tiny_heads, acceptance):
    output = generated(tiny_target, tiny_heads, acceptance=acceptance)
    assert output.shape == (1, 27)
    assert output[0, :5].tolist() == PROMPT[0].tolist()


def test_processors_given_to_decode_see_texts_of_their_own_row(tiny_target, tiny_heads):
    texts = []

    class Recorded(LogitsProcessorList):
        def __call__(self, input_ids, scores):
            texts.append(input_ids[0].tolist())
            return scores

    ids = torch.tensor([[3, 1, 4], [9, 2, 6]])
    recorded = Recorded([lambda ids, scores: scores])
    output = treeopt.decode(tiny_target, ids, recorded, tree=TREE, heads=tiny_heads, max_new_tokens=10)
    assert torch.equal(output, treeopt.decode(tiny_target, ids, tree=TREE, heads=tiny_heads, max_new_tokens=10))
    assert {tuple(text[:3]) for text in texts} == {(3, 1, 4), (9, 2, 6)}
    for text in texts:
        row = output[0 if text[0] == 3 else 1].tolist()
        assert text == row[: len(text)]  # the greedy walk asks about accepted nodes alone


def test_a_tree_with_the_root_alone_decodes_plainly(tiny_target, tiny_heads):
    root = DraftTree.from_paths([])
    output = treeopt.decode(tiny_target, PROMPT, tree=root, heads=tiny_heads, max_new_tokens=22)
    assert torch.equal(output, plain(tiny_target))


# What generate takes and a tree does not


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, r"`inputs_embeds` is given"),
        (
            {"output_scores": True, "return_dict_in_generate": True},
            r"`output_scores` is True, which tree decoding does not",
        ),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(tiny_target, tiny_heads, keywords, message):
    with pytest.raises(TargetError, match=message):
        generated(tiny_target, tiny_heads, **keywords)


PADDED = torch.tensor([[0, 0, 0, 3, 1], [9, 2, 6, 5, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    "keywords",
    [
        {"min_new_tokens": 5, "eos_token_id": 6},
        {"forced_eos_token_id": 4, "eos_token_id": 4},
        {"no_repeat_ngram_size": 2},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_processors_and_criteria_see_a_padded_row_as_in_generate(tiny_target, tiny_heads, keywords):
    keywords = {"attention_mask": MASK, "pad_token_id": 0, **keywords}
    expected = plain(tiny_target, PADDED, **keywords)
    assert torch.equal(generated(tiny_target, tiny_heads, PADDED, **keywords), expected)


def test_processors_that_look_at_a_whole_batch_are_refused_for_one(tiny_target, tiny_heads):
    allowed = {"prefix_allowed_tokens_fn": lambda row, ids: [row, 5]}
    with pytest.raises(
        TargetError, match=r"PrefixConstrained\w+` looks at all 2 prompts of the batch at once; decode them"
    ):
        generated(tiny_target, tiny_heads, PADDED, attention_mask=MASK, pad_token_id=0, **allowed)
    assert torch.equal(generated(tiny_target, tiny_heads, **allowed), plain(tiny_target, **allowed))


def test_a_penalty_of_a_padded_batch_acts_as_in_generate_or_is_refused(tiny_target, tiny_heads):
    keywords = {"attention_mask": MASK, "pad_token_id": 0, "repetition_penalty": 3.0}
    try:
        found = generated(tiny_target, tiny_heads, PADDED, **keywords)
    except TargetError as error:  # within transformers 5 it came to know the rows of a batch
        assert str(error).startswith("`RepetitionPenaltyLogitsProcessor` looks at all 2 prompts")  # noqa: PT017
    else:
        assert torch.equal(found, plain(tiny_target, PADDED, **keywords))


def test_the_output_can_be_written_to_and_learnt_from(tiny_target, tiny_heads):
    verifier = TreeVerifier(tiny_target, tiny_heads, TREE)
    for output in (generated(tiny_target, tiny_heads), verifier.generate(PROMPT, 5)):
        output[output == 5] = 0
        tiny_target(output, labels=output).loss.backward()
    tiny_target.zero_grad()


def test_an_end_of_sequence_that_generate_does_not_know_ends_nothing(tiny_target, tiny_heads, monkeypatch):
    monkeypatch.setattr(tiny_target.config, "eos_token_id", int(plain(tiny_target)[0, 8]))
    assert torch.equal(generated(tiny_target, tiny_heads), plain(tiny_target))
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    for eos in itertools.permutations([6, 2, 9], 2):
        keywords = {"eos_token_id": list(eos)}
        assert torch.equal(generated(tiny_target, tiny_heads, ids, **keywords), plain(tiny_target, ids, **keywords))
