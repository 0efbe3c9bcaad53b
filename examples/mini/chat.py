"""The tokenizer and the chat format: byte-level BPE, every digit one token, `<|end|>` ends each turn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import passkey
from tasks import DRAW_SHORT, draw_short

VOCAB = 1024
PAD, END, SYSTEM, USER, ASSISTANT = SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIALS))
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles: system, user, assistant; got ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer the question.", "You solve small puzzles step by step.",
                  "Think first, then give the final answer.", "Be brief and exact.")  # fmt: skip


def corpus(seed: int, items: int) -> Iterable[str]:
    """Training text for the tokenizer, from the training side of the split."""
    r = Random(seed)
    for _ in range(items):
        for task in DRAW_SHORT:
            item = draw_short(r, task, held_out=False)
            yield item.question
            yield item.response
        yield passkey.compose(r, [passkey.sentence(r) for _ in range(8)], r.random()).question
    yield from SYSTEM_PROMPTS


def build_tokenizer(out: Path, seed: int = 0, items: int = 20_000) -> None:
    """Train the BPE and write tokenizer.json, tokenizer_config.json and chat_template.jinja to `out`."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tok.train_from_iterator(corpus(seed, items), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE, model_max_length=4096,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)  # fmt: skip


class Chat:
    """Token ids of a conversation, as the chat template writes them."""

    def __init__(self, tokenizer_dir: Path):
        self.tok = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        return self.tok.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tok.decode(ids, skip_special_tokens=True)

    def prompt(self, question: str, system: str | None = None) -> list[int]:
        head = [] if system is None else [SYSTEM_ID, *self.encode(system), END_ID]
        return [*head, USER_ID, *self.encode(question), END_ID, ASSISTANT_ID]

    def reply(self, response: str) -> list[int]:
        return [*self.encode(response), END_ID]
