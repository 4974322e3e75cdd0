"""A source for tests: documents given as bytes."""

from __future__ import annotations

from ringflash.data.sources import hash_documents


class MemorySource:
    part = "all documents"

    def __init__(self, documents: dict[str, bytes]):
        self.names = tuple(documents)
        self.documents = list(documents.values())

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        return self.documents[index]

    @property
    def fingerprint(self) -> str:
        return hash_documents(self)


def source_of_lengths(lengths: list[int]) -> MemorySource:
    """Documents of these many bytes, no two of which begin alike."""
    return MemorySource(
        {f"doc{i}": bytes((i * 17 + j) % 251 for j in range(n)) for i, n in enumerate(lengths)}
    )
