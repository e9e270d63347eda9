"""Classifiers from a transformers folder: the module, the loss of one text, and which parameters are trained."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coowned.attribution.identifiers import one_line
from coowned.content.columns import declared_classes
from coowned.errors import InputError, MissingExtraError
from coowned.models.bert_files import refuse_private_checkpoint

HEAD, LORA, NOTHING = FREEZES = ("all but the head", "lora", "none")
_HEADS = ("classifier", "score", "pre_classifier", "classification_head")  # as transformers calls them
_RANK = 4


class Pretrained(NamedTuple):
    """The parts of a folder that `coowned.torch.fit` needs."""

    module: Any
    loss: Callable[[Any, Any], Any]
    predict: Callable[[Any, Any], Any]
    encode: Callable[[dict[str, Any]], Mapping[str, Any]]
    columns: tuple[str, ...]


def read_pretrained(
    folder: str | os.PathLike[str],
    *,
    freeze: str,
    text: str | Sequence[str],
    label: str,
    classes: int | Sequence[Any],
    sequence_length: int = 128,
) -> Pretrained:
    """Reads a text classifier saved by transformers; nothing is looked for outside the folder.

    A head that the folder does not have starts anew, from a public seed. There is no dropout.

    Guarantees:
      - `freeze` decides which parameters are trained: the head alone, LoRA's matrices and the head, or all.
        (test_freeze_says_what_is_trained)
      - Weights that a run of this package made from private data are refused, as are folders that are no such
        classifier.   (test_folders_that_are_refused)
      - The module's scores are those of transformers.   (test_scores_are_those_of_transformers)

    Args:
      folder: config.json, model.safetensors and the tokenizer's files.
      freeze: "all but the head", "lora" or "none".
      text, label, classes, sequence_length: as for `BertClassifier`.
    """
    path, names = Path(folder), (text,) if isinstance(text, str) else tuple(text)
    if freeze not in FREEZES:
        raise InputError(f"freeze must be one of {', '.join(map(repr, FREEZES))}, not {freeze!r}")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no folder with a config.json; give one that transformers' save_pretrained wrote")
    refuse_private_checkpoint(path)
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ImportError:
        raise MissingExtraError("a model from a folder needs transformers; run: pip install transformers") from None
    import torch

    count = len(declared_classes(classes))
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of a head that starts anew, and of LoRA: public
        try:
            module, loaded = AutoModelForSequenceClassification.from_pretrained(
                path,
                num_labels=count,
                local_files_only=True,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, RuntimeError, json.JSONDecodeError) as error:
            raise InputError(
                f"{path}: transformers cannot open it as a classifier ({one_line(error)}); give a folder with "
                f"config.json, model.safetensors and tokenizer for {count} classes"
            ) from None
        module = _frozen(module, freeze, set(loaded["missing_keys"])).eval()

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        said = "\n".join(row[name] or "" for name in names)
        found = tokenizer(said, truncation=True, max_length=sequence_length)["input_ids"]
        padded = found + [tokenizer.pad_token_id or 0] * (sequence_length - len(found))
        return {"tokens": padded, "length": len(found)}

    def scores(module: Any, example: Any) -> Any:
        tokens = example["tokens"]
        unseen = torch.arange(len(tokens)) >= example["length"]
        # What is added to scores of attention, whole: of 0 and 1 transformers would ask whether all are 1.
        mask = torch.where(unseen, torch.finfo(torch.float32).min, 0.0).expand(1, 1, len(tokens), len(tokens))
        return module(input_ids=tokens[None], attention_mask=mask).logits[0]

    def loss(module: Any, example: Any) -> Any:
        return torch.nn.functional.cross_entropy(scores(module, example), example[label])

    def predict(module: Any, example: Any) -> Any:
        return torch.softmax(scores(module, example), -1)

    return Pretrained(module, loss, predict, encode, names)


def _frozen(module: Any, freeze: str, new: set[str]) -> Any:
    """Sets `requires_grad` for the trained parameters; newly initialized ones count as the head."""

    if freeze == LORA:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise MissingExtraError('freeze="lora" needs peft; run: pip install peft') from None
        settings = LoraConfig(
            r=_RANK, lora_alpha=2 * _RANK, lora_dropout=0.0, target_modules="all-linear", task_type="SEQ_CLS"
        )
        return get_peft_model(module, settings)
    if freeze == HEAD:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.startswith(_HEADS) or name in new)
    return module
