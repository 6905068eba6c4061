from __future__ import annotations

from pathlib import Path

import pytest

from dtslurm.config import signatures
from dtslurm.errors import ProfileInvalid
from dtslurm.model.runs.diagnosis import Signature
from dtslurm.worker.evidence import hits, search

PACKAGED = signatures.load(Path("/"), {})
WANTED = {
    "import-error", "gpu-out-of-memory", "host-out-of-memory", "collective-timeout", "rendezvous",
    "port-in-use",
    "invalid-device", "driver-mismatch", "gpu-fault", "link-down", "disk-full", "time-limit", "preempted",
    "cancelled", "node-failure", "segfault", "bus-error", "nan-loss", "container",
}  # fmt: skip


@pytest.fixture
def user_signatures(tmp_path: Path) -> Path:
    folder = tmp_path / "config" / "dtslurm"
    folder.mkdir(parents=True)
    return folder / "signatures.yaml"


def load_signatures(tmp_path: Path) -> dict[str, Signature]:
    result = signatures.load(tmp_path, {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)})
    return {item.name: item for item in result}


@pytest.mark.parametrize("signature", PACKAGED, ids=lambda item: item.name)
def test_every_example_matches_its_signature_in_the_worker_program(signature: Signature) -> None:
    assert signature.examples
    there = hits.LogSignature(0, {"words": signature.words, "match": signature.match})
    for example in signature.examples:
        assert hits.matched(there, example.encode()) is not None, example
        words = [word.encode() for word in signature.words]
        assert search.lines_with(f"before\n{example}\nafter".encode(), words, 0, 1), example


def test_every_cause_that_needs_a_log_line_has_a_signature() -> None:
    assert {item.cause for item in PACKAGED} >= WANTED


def test_signature_words_do_not_occur_in_ordinary_log_lines() -> None:
    everyday = "2026-11-21 16:30:23,123 INFO trainer.py:214 step 12/100 loss 2.71 grad_norm 0.3 lr 3e-04 nccl"
    assert not [(item.name, word) for item in PACKAGED for word in item.words if word in everyday]


def test_user_signatures_add_replace_and_remove_signatures(user_signatures: Path, tmp_path: Path) -> None:
    user_signatures.write_text(
        "signatures:\n"
        "  licence:\n    cause: licence\n    words: [FlexNet]\n    match: ['FlexNet .* -(?P<code>\\d+)']\n"
        "    summary: 'no licence: {code}'\n    blame: site\n"
        "  xid: null\n"
        "  quota: {cause: my-quota, words: [Disk quota], match: [Disk quota exceeded]}\n"
    )
    result = load_signatures(tmp_path)
    assert result["licence"].cause == "licence"
    assert "xid" not in result
    assert result["quota"].cause == "my-quota"


def test_project_signatures_precede_user_signatures(user_signatures: Path, tmp_path: Path) -> None:
    user_signatures.write_text("signatures: {mine: {cause: a, words: [x], match: [x]}}\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / "dtslurm.yaml").write_text("cluster: local\n")
    (tmp_path / "signatures.yaml").write_text("signatures: {mine: {cause: b, words: [x], match: [x]}}\n")
    assert load_signatures(tmp_path)["mine"].cause == "b"


def test_all_mistakes_in_signatures_are_reported_together_with_their_lines(
    user_signatures: Path, tmp_path: Path
) -> None:
    user_signatures.write_text(
        "signatures:\n  one:\n    cause: Not A Slug\n    words: []\n    match: ['(']\n    role: boss\n"
        "    strength: 101\n    blame: me\n    colour: red\nother: 1\n"
    )
    with pytest.raises(ProfileInvalid) as caught:
        load_signatures(tmp_path)
    text = "\n".join(caught.value.problems)
    for part in (
        ":3: one.cause",
        ":4: one.words",
        ":5: one.match",
        ":6: one.role",
        ":7: one.strength",
        ":8: one.blame",
        ":9: one.colour",
        ":10: other",
    ):
        assert part in text
