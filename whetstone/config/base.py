"""What every room of the configuration is: a frozen model, its fields documented by the text below."""

from pydantic import BaseModel, ConfigDict


class Room(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
