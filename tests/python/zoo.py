"""Small models of every kind that a release of parameters could break. Each is a class or a function that
builds a module;
`forward(*batch)` of the module returns the loss, `batches(i)` the inputs of step i."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 61


def tokens(i, length=12, batch=2):
    generator = torch.Generator().manual_seed(100 + i)
    return (torch.randint(0, VOCABULARY, (batch, length), generator=generator),)


def vectors(i, shape=(6, 16)):
    generator = torch.Generator().manual_seed(100 + i)
    return (torch.randn(shape, generator=generator),)


def images(i):
    return vectors(i, (4, 3, 8, 8))


class Language(nn.Module):
    """A Hugging Face model with its loss."""

    def __init__(self, model, checkpointing=None):
        super().__init__()
        self.model = model
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def llama(checkpointing=None, tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    return Language(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32,
                tie_word_embeddings=tied,
            )
        ),
        checkpointing,
    )


def gpt2(checkpointing=None):
    from transformers import GPT2Config, GPT2LMHeadModel

    return Language(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=32,
                n_embd=32,
                n_layer=3,
                n_head=4,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
        checkpointing,
    )


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return Language(
        MixtralForCausalLM(
            MixtralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32,
                num_local_experts=4,
                num_experts_per_tok=2,
            )
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    return Language(
        T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        )
    )


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        logits = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return F.cross_entropy(logits.float(), torch.arange(len(x), device=x.device) % 5)


def channels_last():
    return ResNet().to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(24, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        out, _ = self.lstm(self.embed(ids))
        state = out.new_zeros(len(ids), 8)
        losses = []
        for t in range(out.shape[1] - 1):
            state = self.cell(out[:, t], state)
            losses.append(F.cross_entropy(self.head(state).float(), ids[:, t + 1]))
        return torch.stack(losses).mean()


class SkipsLayers(nn.Module):
    """Stochastic depth: another set of layers at every step; a skipped layer has no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + torch.tanh(layer(x))
        return self.head(x).float().square().mean()


class DataDependent(nn.Module):
    """The order and number of calls depend on values."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.experts = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.up(x) if x.sum() > 0 else self.down(x))
        name = "a" if x[0, 0] > x[0, 1] else "b"
        return self.experts[name](x).float().square().mean()


class Scale(torch.autograd.Function):
    """Keeps the weight on ctx, where no hook sees it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.w, (gradient * ctx.x).sum(0)


class Odd(nn.Module):
    """A layer used twice, a weight used outside its module, lists of parameters, unused and frozen ones,
    weight_norm,
    parametrizations, a hand-written Function."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.outside = nn.Linear(16, 16)
        self.items = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(3))
        self.named = nn.ParameterDict(
            {"gain": nn.Parameter(torch.ones(16)), "bias": nn.Parameter(torch.zeros(16))}
        )
        self.unused = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.normed = nn.utils.weight_norm(nn.Linear(16, 16))
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.orthogonal = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.scale = nn.Parameter(torch.randn(16))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        x = F.linear(x, self.outside.weight.t(), self.outside.bias) + self.frozen(x)
        for item in self.items:
            x = x * item + self.scalar
        x = x * self.named["gain"] + self.named["bias"]
        x = self.orthogonal(self.parametrized(torch.tanh(self.normed(x))))
        return Scale.apply(x, self.scale).float().square().mean()


class Clamps(nn.Module):
    """Edits its weights in forward, as Wasserstein critics and max-norm layers do: counted by autograd, and
    through .data."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        self.second.weight.data.clamp_(-0.1, 0.1)
        self.third.weight.data[0] = 0.25
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x))))).float().square().mean()


class HandCheckpointed(nn.Module):
    """Recomputes a function that uses another module's weight; nested; with a user's own saved-tensor hooks
    around."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.other = nn.Linear(16, 16).requires_grad_(False)

    def inner(self, x):
        return torch.tanh(self.layers[1](x)) @ self.other.weight

    def outer(self, x):
        x = torch.tanh(self.layers[0](x))
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.layers[2](x)

    def forward(self, x):
        x = x.to(self.other.weight.dtype).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            x = checkpoint(self.outer, x, use_reentrant=self.reentrant)
        return checkpoint(self.outer, x, use_reentrant=self.reentrant).float().square().mean()


class GradientPenalty(nn.Module):
    """Double backward in forward (WGAN-GP)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        value = self.net(x)
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value.float().mean() + (slope.float().norm(dim=1) - 1).square().mean()


ZOO = {
    "llama": (llama, tokens),
    "llama_untied_reentrant": (lambda: llama(True, False), tokens),
    "llama_checkpointed": (lambda: llama(False), tokens),
    "gpt2": (gpt2, tokens),
    "gpt2_checkpointed": (lambda: gpt2(False), tokens),
    "gpt2_reentrant": (lambda: gpt2(True), tokens),
    "mixtral": (mixtral, tokens),
    "t5": (t5, tokens),
    "resnet": (ResNet, images),
    "resnet_channels_last": (channels_last, images),
    "recurrent": (Recurrent, tokens),
    "skips_layers": (SkipsLayers, vectors),
    "data_dependent": (DataDependent, vectors),
    "odd": (Odd, vectors),
    "clamps": (Clamps, vectors),
    "checkpoint": (lambda: HandCheckpointed(False), vectors),
    "checkpoint_reentrant": (lambda: HandCheckpointed(True), vectors),
    "gradient_penalty": (GradientPenalty, vectors),
}


def build(name, dtype=torch.float32):
    torch.manual_seed(0)
    make, batches = ZOO[name]
    model = make().train().to(dtype)

    def batch(i):
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in batches(i))

    return model, batch
