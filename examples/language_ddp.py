"""GPT-2 and BERT-Large of the transformers package under DistributedDataParallel.

    echo-explore predict --script examples/language_ddp.py:gpt2 --world 8 --cluster a100-80gb-hdr

Models are made from their configurations with random weights; nothing is downloaded. Change SEQUENCES and PRECISION to
what your job uses.
"""

from collections.abc import Callable

import torch
from torch import nn

SEQUENCES = 8
"""A GPU."""
PRECISION = torch.bfloat16
"""Of the autocast; torch.float32 leaves everything in fp32."""
Step = tuple[Callable[[], None], nn.Module]


def training_step(model: nn.Module, length: int) -> Step:
    """Forward, loss, backward and AdamW of a model that returns its loss."""
    model = model.cuda().train()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(SEQUENCES, length, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", PRECISION, enabled=PRECISION is not torch.float32):
            loss = parallel(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def gpt2() -> Step:
    """GPT-2 with 124 million parameters, 1,024 tokens a sequence."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return training_step(GPT2LMHeadModel(GPT2Config()), 1024)


def bert_large() -> Step:
    """BERT-Large with 335 million parameters, 512 tokens a sequence."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return training_step(BertForMaskedLM(config), 512)
