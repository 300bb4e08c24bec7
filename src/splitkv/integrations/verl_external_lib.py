"""The module that verl imports in every worker where `model.external_lib` names it: importing it
registers `attn_implementation="splitkv_ulysses"`."""

from __future__ import annotations

from splitkv.integrations.verl import register

register()
