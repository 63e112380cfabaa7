import torch

from treeopt import chain, dense_tree
from treeopt.agreement import replay_disagreements, trace_of
from treeopt.calibrate.continuations import Continuation
from treeopt.targets.loading import eos_ids
from treeopt.tree import DraftTree
from treeopt.verify import TreeVerifier
from treeopt.verify.texts import Decoded

PROMPTS = [(3, 1, 4), (9, 2, 6, 5), (7,), (2, 7), (1, 8, 2), (12, 5)]
TREES = [chain(0), chain(4), dense_tree([3, 2]), DraftTree.from_paths([(0,), (2,), (2, 1), (1,), (1, 0), (2, 1, 0)])]


def decoded_documents(target, heads, tree, max_new_tokens=24):
    rows = TreeVerifier(target, heads, tree).decode(PROMPTS, max_new_tokens)
    documents = [Continuation(str(i), None, p, tuple(row.tokens)) for i, (p, row) in enumerate(zip(PROMPTS, rows))]
    return documents, rows


def test_replay_takes_exactly_the_verifiers_steps_of_every_tree(tiny_loaded, tiny_heads):
    documents, _ = decoded_documents(tiny_loaded.model, tiny_heads, chain(0))
    trace = trace_of(tiny_loaded, tiny_heads, documents)
    steps = set()
    for tree in TREES:
        again, rows = decoded_documents(tiny_loaded.model, tiny_heads, tree)
        assert again == documents
        assert replay_disagreements(tree, trace, documents, rows) == []
        steps.add(sum(row.num_steps for row in rows))
    assert len(steps) > 1


def test_documents_that_end_at_the_end_of_sequence_agree_too(tiny_loaded, tiny_heads, monkeypatch):
    documents, _ = decoded_documents(tiny_loaded.model, tiny_heads, chain(0))
    eos = documents[0].tokens[7]
    monkeypatch.setattr("treeopt.verify.verifier.eos_ids", lambda target: {eos})
    assert eos not in eos_ids(tiny_loaded.model)
    for tree in TREES:
        ended, rows = decoded_documents(tiny_loaded.model, tiny_heads, tree)
        assert min(len(document.tokens) for document in ended) < 24
        assert replay_disagreements(tree, trace_of(tiny_loaded, tiny_heads, ended), ended, rows) == []


def test_a_disagreement_names_the_document_and_both_counts(tiny_loaded, tiny_heads):
    documents, rows = decoded_documents(tiny_loaded.model, tiny_heads, chain(2))
    trace = trace_of(tiny_loaded, tiny_heads, documents)
    wrong = [*rows[:3], Decoded(rows[3].tokens, [*rows[3].accepted, 0]), *rows[4:]]
    (found,) = replay_disagreements(chain(2), trace, documents, wrong)
    assert (found.document, found.counted) == ("3", found.replayed + 1)


def test_the_trace_is_in_the_documents_order(tiny_loaded, tiny_heads):
    documents, _ = decoded_documents(tiny_loaded.model, tiny_heads, chain(0))
    short = [Continuation(d.prompt_id, None, d.prompt, d.tokens[: 24 - 3 * i]) for i, d in enumerate(documents)]
    whole = trace_of(tiny_loaded, tiny_heads, short)
    for i, document in enumerate(short):
        alone = trace_of(tiny_loaded, tiny_heads, [document])
        assert torch.equal(torch.tensor(whole.select([i]).ranks), torch.tensor(alone.ranks))
