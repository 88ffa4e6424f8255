"""A model of vLLM that is an LM head alone, for tests of the operator that draws from it."""

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

VOCAB_SIZE, PADDED_SIZE, WIDTH = 150, 192, 8


class HeadLayer(nn.Module):
    """Has what vLLM's layer of the head has; rows that pad the vocabulary would win every draw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(PADDED_SIZE, WIDTH)
        weight[VOCAB_SIZE:] = 100.0
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()
        self.tp_size = 1
        # On a CPU vLLM multiplies by this.
        self.cpu_linear = nn.functional.linear


class Model(nn.Module):
    """A model of vLLM, with its layers `logits_processor` and `lm_head`."""

    def __init__(self, **options):
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            self.logits_processor = LogitsProcessor(PADDED_SIZE, VOCAB_SIZE, **options)
        self.logits_processor.head_dtype = torch.float32
        self.lm_head = HeadLayer()

    def compute_logits(self, hidden):
        return self.logits_processor(self.lm_head, hidden)
