"""Makes the tiny model: a random-weight Llama of 344,384 parameters in a Hugging Face folder, with nothing downloaded.

Its words mean nothing, and need not: the tests look at the wire, and 500 tokens/s on one core are enough to have
a stream in flight for as long as a test wants. Runs inside the engine environment: `python make_tiny_model.py FOLDER`.

1. The weights come from a fixed seed, so that two machines see the same model.
2. The tokenizer is a byte-level BPE trained on the standard library of the Python that runs this: real text that every
   machine has. Another Python gives other merges, and no test depends on them.
3. Heads are 32 wide, the smallest that vLLM's CPU attention takes.
4. Positions go to 32,768, so that one stream can be made to last a minute: nothing here may end by itself.
"""

import sys
import sysconfig
from pathlib import Path

# These three live in the engine environment only, where nothing type-checks.
import torch  # type: ignore[import-not-found]
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # type: ignore[import-not-found]

VOCABULARY = 2048
SPECIAL = ["<pad>", "<s>", "</s>"]
TRAINING_FILES = 120  # a few MB of text: enough for 2,048 merges, trained within seconds
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def main(folder: Path) -> None:
    """Writes config, weights, tokenizer and chat template to the folder, making it if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(20261129)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {folder}")


def _tokenizer() -> PreTrainedTokenizerFast:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:TRAINING_FILES]
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(file) for file in files], vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=32768,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
