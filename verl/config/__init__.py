"""Configuration: typed sections, strict keys, one table of other spellings. See docs/examples/config.md."""

from verl.config.checks import check_config
from verl.config.describe import config_to_dict, config_to_yaml, describe_config
from verl.config.load import config_from_dict, load_config
from verl.config.purpose import ANY, EVAL, GENERATE, SFT, TRAIN, TRAINER, Purpose
from verl.config.schema import Config

__all__ = [
    "ANY",
    "EVAL",
    "GENERATE",
    "SFT",
    "TRAIN",
    "TRAINER",
    "Config",
    "Purpose",
    "check_config",
    "config_from_dict",
    "config_to_dict",
    "config_to_yaml",
    "describe_config",
    "load_config",
]
