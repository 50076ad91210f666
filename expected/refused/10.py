# Wrong answers that the checks of lesson 10 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 10.1
def first_half_only(x, rank, world):
    pieces = ring_reduce_scatter(list(x.chunk(world)), rank, world)
    return torch.cat(pieces), (world - 1) * pieces[0].nbytes


def adds_twice(x, rank, world):
    pieces, sent = list(x.chunk(world)), 0
    for step in range(2 * (world - 1)):
        give, take = (rank - step) % world, (rank - step - 1) % world
        pieces[take] = pieces[take] + pass_on(pieces[give], rank, world)
        sent += pieces[give].nbytes
    return torch.cat(pieces), sent


def sends_all_to_all(x, rank, world):
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x)
    return sum(parts), (world - 1) * x.nbytes


lesson.refuse(
    "10.1", ring_all_reduce=[first_half_only, adds_twice, sends_all_to_all]
)


# %% 10.2
class Summed(Overlapped):
    def finish(self):
        for handle, _ in self.waiting:
            handle.wait()
        self.waiting.clear()


class OwnWeights(Overlapped):
    def __init__(self, model):
        self.waiting = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.start)


class WaitsInTheHook(Overlapped):
    def start(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


class WaitsOnEachHandle(Overlapped):
    def start(self, parameter):
        super().start(parameter)
        handle, _ = self.waiting[-1]
        handle.wait()


class SendsAtTheEnd(Overlapped):
    def start(self, parameter):
        self.waiting.append((None, parameter))

    def finish(self):
        parameters = [parameter for _, parameter in self.waiting]
        self.waiting = []
        for parameter in parameters:
            super().start(parameter)
        super().finish()


class NeverForgets(Overlapped):
    def finish(self):
        for handle, parameter in self.waiting:
            handle.wait()
            parameter.grad.div_(dist.get_world_size())


lesson.refuse(
    "10.2",
    Overlapped=[
        Summed,
        OwnWeights,
        WaitsInTheHook,
        WaitsOnEachHandle,
        SendsAtTheEnd,
        NeverForgets,
    ],
)


# %% 10.3
def ignore_the_remainder(batch, world, most):
    micro = min(most, batch // world)
    return micro, -(-batch // world // micro)


lesson.refuse(
    "10.3", divide=[ignore_the_remainder, lambda batch, world, most: (most, batch // most)]
)


# %% 10.4
def mean_of_means(reports):
    return np.exp(np.mean([loss for rank in reports for loss, _ in rank]))


def mean_of_perplexities(reports):
    batches = [batch for rank in reports for batch in rank]
    perplexities = [np.exp(loss) for loss, _ in batches]
    return np.average(perplexities, weights=[tokens for _, tokens in batches])


lesson.refuse("10.4", merge=[mean_of_means, mean_of_perplexities])


# %% 10.5
def mended_but(fault):
    """The solution with one fault left in it."""

    def train_on(goal):
        rank = dist.get_rank()
        model = make_model(SEED + rank if fault == "weights" else SEED)
        optimizer, _ = recipe(model, warm_up=1)
        losses, norms, tokens = [], [], torch.zeros(1, device=rank_device())
        overlapping = slice(4 * rank, 4 * rank + 5)
        for whole in batches:
            mine = whole[overlapping if fault == "rows" else my_share()]
            loss = loss_of(model, mine)
            loss.backward()
            (sum_gradients if fault == "sum" else average_gradients)(model)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            tokens += mine[:, 1:].numel()
            own = loss.item()
            if fault != "stop":
                own = average(loss.detach()).item()
            losses.append(own)
            if losses[-1] < goal:
                break
        if fault != "lone" or rank == 0:
            dist.all_reduce(tokens)
        return [losses, norms, tokens.item()]

    return train_on


faults = ("weights", "rows", "sum", "stop", "lone")
lesson.refuse("10.5", mended=[broken, *(mended_but(fault) for fault in faults)])
