# Wrong answers that the checks of lesson 12 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 12.1
lesson.refuse(
    "12.1",
    bytes_for=[
        {**bytes_for, "mixed, 8-bit": 6},
        {**bytes_for, "adafactor": 12},
        {**bytes_for, "frozen": 6},
        {**bytes_for, "pure bf16": 10},
    ],
)


# %% 12.2
class CountsViews(Ledger):
    def count(self, storage):
        self.known.discard(storage._cdata)
        super().count(storage)


class KnowsNoTuples(Ledger):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.count(made.untyped_storage())
        return made


class NeverForgets(Ledger):
    def forget(self, address, size):
        pass


class KeepsOldAddresses(Ledger):
    def forget(self, address, size):
        self.now -= size


class HasNoPeak(Ledger):
    def forget(self, address, size):
        super().forget(address, size)
        self.peak = self.now


lesson.refuse(
    "12.2",
    Ledger=[CountsViews, KnowsNoTuples, NeverForgets, KeepsOldAddresses, HasNoPeak],
)


# %% 12.3
encode_well, decode_well = encode, decode


def space_equally(x, least=0):
    x = F.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
    scales = x.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return (127 * x / scales).round().clamp_min(least).to(torch.int8), scales


def forget_the_least(x, least=0):
    return encode_well(x)


def scale_all_alike(x, least=0):
    codes, _ = encode_well(x, least)
    return codes, x.abs().max().expand(len(codes), 1).clone()


def forget_the_sign(x, least=0):
    codes, scales = encode_well(x, least)
    return codes.abs(), scales


def keep_it_whole(x, least=0):
    return x.clone(), torch.ones(1)


def forget_the_scale(codes, scales, shape):
    return decode_well(codes, torch.ones_like(scales), shape)


def adam(correct=True, decoupled=True, second=0.999, floor=1, bytes_only=True):
    """An update with one thing wrong."""

    def update(weight, gradient, state, rate=1e-3, decay=0.01):
        if not state:
            state.update(t=0, m=encode_well(0 * gradient), v=encode_well(0 * gradient))
        state["t"] += 1
        if not decoupled:
            gradient = gradient + decay * weight
        m = decode_well(*state["m"], weight.shape).lerp(gradient, 0.1)
        v = decode_well(*state["v"], weight.shape).lerp(gradient.square(), 1 - second)
        state["m"], state["v"] = encode_well(m), encode_well(v, least=floor)
        if not bytes_only:
            state["whole"] = m
        if correct:
            m, v = m / (1 - 0.9 ** state["t"]), v / (1 - second ** state["t"])
        if decoupled:
            weight.mul_(1 - rate * decay)
        weight.sub_(rate * m / (v.sqrt() + 1e-8))

    return update


lesson.refuse("12.3", encode=[space_equally, forget_the_least, scale_all_alike])
lesson.refuse("12.3", encode=[forget_the_sign, keep_it_whole], decode=forget_the_scale)
lesson.refuse(
    "12.3",
    update=[
        adam(correct=False),
        adam(decoupled=False),
        adam(second=0.9),
        adam(floor=0),
        adam(bytes_only=False),
    ],
)


# %% 12.4
right = peak_bytes


def know_only_the_states(config, sequences, length):
    return right(config, 0, 0)


def forget_the_update(config, sequences, length):
    few, none = right(config, 1, 10**6), right(config, 2, 10**6)
    each = (none - few) / 10**6
    return few - 10**6 * each + sequences * length * each


def copy_the_logits_once(config, sequences, length):
    return right(config, sequences, length) - 8 * sequences * length * config.vocab_size


def share_no_heads(config, sequences, length):
    keys = config.num_key_value_heads
    config.num_key_value_heads = config.num_attention_heads
    peak = right(config, sequences, length)
    config.num_key_value_heads = keys
    return peak


def forget_the_batch(config, sequences, length):
    return right(config, 1, length)


def take_two_of_any_matrix(config, sequences, length):
    matrix = config.hidden_size * config.intermediate_size
    table = config.hidden_size * config.vocab_size
    lacking = 4 * matrix if 3 * matrix > 2 * table else 0
    return right(config, sequences, length) - lacking


def take_three_of_the_table(config, sequences, length):
    table = config.hidden_size * config.vocab_size
    return right(config, sequences, length) + 4 * table


def run_it_after_all(config, sequences, length):
    return right(config, sequences, length) + sum(1 for _ in range(10**9)) * 0


lesson.refuse(
    "12.4",
    peak_bytes=[
        know_only_the_states,
        forget_the_update,
        copy_the_logits_once,
        share_no_heads,
        forget_the_batch,
        take_two_of_any_matrix,
        take_three_of_the_table,
        run_it_after_all,
    ],
)


# %% 12.5
def forget_the_activations(width, flops, bandwidth, size=2):
    return math.ceil(flops / bandwidth * size / 2)


def forget_the_size(width, flops, bandwidth, size=2):
    return well(width, flops, bandwidth)


def forget_the_narrow(width, flops, bandwidth, size=2):
    return abs(math.ceil(flops / bandwidth * size * width / (2 * width - flops / bandwidth * 2 * size)))


well = tokens_to_fill
lesson.refuse(
    "12.5", tokens_to_fill=[forget_the_activations, forget_the_size, forget_the_narrow]
)
