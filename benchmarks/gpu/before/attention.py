"""The attention of 0324bce: autograd stacks the gradients of queries, keys and values, then copies
them."""

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor

from fairseq_alma.switch_lm import CausalSelfAttention


def forward(
    self: CausalSelfAttention,
    x_BTD: Tensor,
    mask_TT: Tensor | None,
    padding_BT: Tensor | None,
    incremental_state,
) -> Tensor:
    """CausalSelfAttention.forward."""
    if mask_TT is None or padding_BT is not None or self.use_xformers:
        x_TBD = x_BTD.transpose(0, 1)
        h_TBD, _ = MultiheadAttention.forward(
            self,
            x_TBD,
            x_TBD,
            x_TBD,
            padding_BT,
            incremental_state,
            need_weights=False,
            attn_mask=mask_TT,
        )
        return h_TBD.transpose(0, 1)
    projections = (self.q_proj, self.k_proj, self.v_proj)
    weight = torch.cat([projection.weight for projection in projections])
    bias = torch.cat([projection.bias for projection in projections])
    qkv = F.linear(x_BTD, weight, bias).view(*x_BTD.shape[:2], 3, self.num_heads, self.head_dim)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    drops = self.training or self.dropout_module.apply_during_inference
    dropout = self.dropout_module.p if drops else 0.0
    attention = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    return self.out_proj(attention.transpose(1, 2).reshape(x_BTD.shape))
