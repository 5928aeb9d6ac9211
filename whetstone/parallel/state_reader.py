"""torch's distributed checkpoint, read without unpickling anything but a description of tensors.

torch itself unpickles without restriction: a checkpoint from somebody else could run code.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

ALLOWED = {
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


class StateReader(FileSystemReader):
    """Refuses metadata that holds anything but what torch writes there."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            try:
                metadata = MetadataUnpickler(file).load()
            except Exception as error:  # whatever a broken pickle comes to
                raise ValueError(f".metadata: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(".metadata holds something else")
        for name in {info.relative_path for info in metadata.storage_data.values()}:
            if Path(name).name != name or not (Path(self.path) / name).is_file():
                raise ValueError(f".metadata names {name!r}, which is no file beside it")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that torch's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint")
        return super().find_class(module, name)


class TensorPlanner(DefaultLoadPlanner):
    """Reads tensors only: torch would unpickle anything else."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")
