"""The request of the real package: any of its fields."""

from __future__ import annotations

from typing import Any

from sglang.signatures import check_fields, recorded


class GenerateReqInput:
    def __init__(self, **kwargs: Any):
        check_fields("GenerateReqInput", kwargs)
        self.__dict__ |= dict.fromkeys(recorded()["GenerateReqInput"].__annotations__) | kwargs
