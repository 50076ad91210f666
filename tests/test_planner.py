"""The planner: each formula against a published layout worked out by hand, its choices against sense."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pydantic
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages import planner
from stages.planner import MACHINES, Layout, Link, Machine, Shape
from stages.recipe import flops_per_token
from utils.errors import CourseError

GPT2 = Shape(124e6, 12, 768, 1024, 50257)
LARGE = Shape(70e9, 80, 8192, 4096, 128_000)
H100 = MACHINES["H100"]
# Megatron-LM (Narayanan et al. 2021, Table 1, last line): a trillion parameters on 3,072 A100,
# 8 tensor x 64 pipeline x 6 data parallel, activations recomputed, 3,072 rows of 2,048 tokens.
MEGATRON = Shape(1008e9, 128, 25_600, 2048, 51_200)
TRILLION = Layout(tensor=8, pipeline=64, data=6, checkpointing=True)
# Without pipeline, sharded in a node: 1.5 billion parameters on two nodes.
HYBRID = Layout(data=16, shards=8)
XL = Shape(1.5e9, 48, 1600, 1024, 50_000)


# operations --------------------------------------------------------------------------------------


def test_operations_of_a_token_in_absolute_numbers():
    # 6 * 124e6 = 744,000,000 and 12 * 12 * 768 * 1024 = 113,246,208
    assert GPT2.estimated_flops_per_token() == 857_246_208


@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_is_that_of_a_real_model_but_for_embedding_and_norms(tied):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = Shape(parameters, 4, 64, 128, 512)
    norms = (2 * 4 + 1) * 64
    # A tied embedding multiplies as the head; one of its own is only looked up.
    lookup = 0 if tied else 512 * 64
    difference = shape.estimated_flops_per_token() - flops_per_token(model, 128)
    assert difference == 6 * (norms + lookup)


@pytest.mark.parametrize(
    "field", ["parameters", "layers", "width", "context", "vocabulary"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_shape_of_nothing_is_refused(field, value):
    with pytest.raises(pydantic.ValidationError, match=field):
        replace(GPT2, **{field: value})


@pytest.mark.parametrize(
    "field, value",
    [("flops", 0), ("memory", -1), ("node", 0), ("inside", -1), ("hourly", -0.1)],
)
def test_a_machine_out_of_range_is_refused(field, value):
    with pytest.raises(pydantic.ValidationError, match=field):
        replace(H100, **{field: value})


# memory ------------------------------------------------------------------------------------------


def test_states_of_the_published_layout():
    # 18 * 1008e9 / (8 * 64): the six copies share nothing
    assert planner.state_bytes(MEGATRON, TRILLION) == 35_437_500_000
    # Shards have no copy in 16 bits: 16 * 1008e9 / (8 * 64 * 6)
    shared = replace(TRILLION, shards=6)
    assert planner.state_bytes(MEGATRON, shared) == 5_250_000_000
    assert planner.state_bytes(XL, HYBRID) == 3e9
    assert planner.state_bytes(XL, Layout(), "float32") == 24e9


def test_what_passes_through_a_device_in_absolute_numbers():
    # A layer has 31,250,000 parameters, the table 80,000,000 numbers. Two layers as copies
    # 125,000,000, gradients of one 62,500,000 and 125,000,000, the table 160,000,000 bytes.
    assert planner.transit_bytes(XL, HYBRID) == 472_500_000
    assert planner.transit_bytes(XL, replace(HYBRID, tensor=2)) == 236_250_000
    assert planner.transit_bytes(XL, Layout(data=16)) == 0
    # In float32: 4 * (2 + 1) + 4 a parameter of a layer, and 4 a number of the table.
    assert planner.transit_bytes(XL, HYBRID, "float32") == 820_000_000


def test_activations_that_are_kept_in_absolute_numbers():
    # A token: 1,600 * (36 * 48 + 6) = 2,774,400 and the scores 12 * 50,000 = 600,000
    assert planner.activation_bytes(XL, HYBRID) == 1024 * 3_374_400
    assert planner.activation_bytes(XL, HYBRID, rows=4) == 4 * 1024 * 3_374_400
    # in float32 1,600 * (64 * 48 + 8) = 4,928,000
    assert planner.activation_bytes(XL, HYBRID, 1, "float32") == 1024 * 5_528_000


def test_activations_that_are_computed_again_in_absolute_numbers():
    # inputs 1,600 * (4 * 48 + 6) = 316,800; a layer 56 * 1,600 = 89,600 is less than the scores
    layout = Layout(checkpointing=True)
    assert planner.activation_bytes(XL, layout) == 1024 * 916_800
    few_words = replace(XL, vocabulary=1000)
    assert planner.activation_bytes(few_words, layout) == 1024 * 406_400


def test_activations_of_a_pipeline_that_recomputes_in_absolute_numbers():
    # A token of the first of 64 stages of two layers: 64 times its inputs 25,600 * (4 * 2 + 6), and
    # one layer 56 * 25,600; over 8 devices.
    of_a_token = 64 * 358_400 + 1_433_600
    assert (
        planner.activation_bytes(MEGATRON, TRILLION)
        == 2048 * of_a_token / 8
        == 6_239_027_200
    )


@pytest.mark.parametrize(
    "stages, of_a_token",
    # the last stage: one micro-batch and the scores; the first: as many as there are stages
    [
        (1, 3_374_400),
        (2, 2_816_000),
        (4, 2_835_200),
        (8, 2_873_600),
        (16, 2_950_400),
    ],
)
def test_micro_batches_in_flight_follow_the_stages(stages, of_a_token):
    layout = Layout(pipeline=stages)
    assert planner.activation_bytes(XL, layout) == 1024 * of_a_token


def test_memory_of_a_device_in_absolute_numbers():
    # states 3,000,000,000; others' shards 472,500,000; activations 3,455,385,600;
    # context and workspaces 1,000,000,000
    assert planner.memory_per_device(XL, HYBRID) == 7_927_885_600
    # a whole copy has nothing to gather
    assert (
        planner.memory_per_device(XL, Layout(data=16)) == 27e9 + 3_455_385_600 + 1e9
    )
    # of a layer that is cut over two devices half is gathered
    cut = planner.memory_per_device(XL, Layout(tensor=2, data=8, shards=8))
    assert cut == 1.5e9 + 236_250_000 + 3_455_385_600 / 2 + 1e9


def test_a_pass_takes_the_rows_that_fit():
    layout = Layout(data=8, shards=8)
    rows = planner.rows_that_fit(GPT2, layout, H100, 2**22)[-1]
    fits = planner.memory_per_device(GPT2, layout, rows)
    assert (
        fits
        <= 0.9 * H100.memory
        < planner.memory_per_device(GPT2, layout, 2 * rows)
    )
    five_rows = 8 * 1024 * 5
    assert planner.rows_that_fit(GPT2, layout, H100, five_rows) == [1, 2, 4]
    assert planner.rows_that_fit(LARGE, Layout(), H100, 2**22) == []


# traffic -----------------------------------------------------------------------------------------


def test_a_ring_costs_what_the_formula_says():
    link = Link(1e-3, 1e9)
    assert link.seconds("all_reduce", 4e9, 4) == pytest.approx(6 * (1e-3 + 1))
    scatter = link.seconds("reduce_scatter", 1e9, 8)
    gather = link.seconds("all_gather", 1e9, 8)
    assert scatter + gather == pytest.approx(link.seconds("all_reduce", 1e9, 8))
    assert link.seconds("all_reduce", 1e9, 1) == 0


def test_traffic_of_copies_in_absolute_numbers():
    # two nodes: 3e9 bytes of gradients, twice fifteen sixteenths, once a step, on 8 * 50e9 a second
    layout = Layout(data=16)
    seconds = planner.communication_seconds(XL, layout, H100, rows=8, passes=5)
    assert seconds == pytest.approx(0.0140625)
    # one node: seven eighths, and the link inside, 450e9
    inside = planner.communication_seconds(XL, Layout(data=8), H100, rows=8)
    assert (
        inside
        == pytest.approx(2 * 7 / 8 * 3e9 / 450e9)
        == pytest.approx(0.011667, rel=1e-4)
    )


def test_traffic_of_shards_in_absolute_numbers():
    # over two nodes: three times fifteen sixteenths of 3e9, on 8 * 50e9, in each of five passes
    layout = Layout(data=16, shards=16)
    seconds = planner.communication_seconds(XL, layout, H100, rows=8, passes=5)
    assert seconds == pytest.approx(5 * 0.02109375)


def test_traffic_of_shards_in_a_node_and_copies_across_in_absolute_numbers():
    # inside: 3 * 7/8 * 3e9 / 450e9 = 0.0175 a pass; across: an eighth of 3e9, 2 * 1/2, and each of
    # the eight rings has one member in a node, so one link of 50e9
    seconds = planner.communication_seconds(XL, HYBRID, H100, rows=8, passes=2)
    assert seconds == pytest.approx(2 * 0.0175 + 0.0075)


def test_traffic_of_a_cut_layer_in_absolute_numbers():
    # four sums a layer: 48 * 4 * 2 * 3/4 * (2 * 8 * 1,024 * 1,600) bytes at 450e9
    layout = Layout(tensor=4)
    seconds = planner.communication_seconds(XL, layout, H100, rows=8)
    assert (
        seconds
        == pytest.approx(288 * 26_214_400 / 450e9)
        == pytest.approx(0.0167772)
    )
    # and six where the layer is computed again
    again = replace(layout, checkpointing=True)
    more = planner.communication_seconds(XL, again, H100, rows=8)
    assert more == pytest.approx(1.5 * seconds)


def test_traffic_of_a_pipeline_in_absolute_numbers():
    # activations forward and their gradients back: 2 * 26,214,400 bytes; 16 stages leave the node
    layout = Layout(pipeline=16)
    seconds = planner.communication_seconds(XL, layout, H100, rows=8)
    assert seconds == pytest.approx(52_428_800 / 50e9)
    inside = planner.communication_seconds(XL, Layout(pipeline=8), H100, rows=8)
    assert inside == pytest.approx(52_428_800 / 450e9)


def test_a_ring_has_the_links_of_all_its_members_in_a_node():
    slow = replace(H100, outside=6.25e9)
    assert slow.link(8).bandwidth == 450e9
    assert slow.link(16).bandwidth == 8 * 6.25e9
    assert slow.link(64, stride=4).bandwidth == 2 * 6.25e9
    assert slow.link(64, stride=8).bandwidth == 6.25e9
    assert slow.link(1024, stride=64).bandwidth == 6.25e9
    # and never more than it has inside
    assert replace(H100, outside=100e9).link(16).bandwidth == 450e9


def test_copies_across_send_out_two_thirds_of_what_shards_across_do():
    # with hundreds of nodes a link carries 3 * 3e9 / 8 bytes for one copy, 2 * 3e9 / 8 for a copy a node
    slow = replace(H100, inside=1e15, outside=6.25e9)
    shared = planner.communication_seconds(
        XL, Layout(data=8192, shards=8192), slow, 8
    )
    copied = planner.communication_seconds(XL, Layout(data=8192, shards=8), slow, 8)
    assert copied / shared == pytest.approx(2 / 3, rel=2e-3)


def test_one_device_talks_to_nobody():
    assert planner.communication_seconds(XL, Layout(), MACHINES["T4"], rows=8) == 0


# time --------------------------------------------------------------------------------------------


def test_hours_of_a_device_in_absolute_numbers():
    # 857,246,208 operations of each of 1e9 tokens, at 29% of 989e12 a second
    hours = planner.device_hours(GPT2, 1e9, H100)
    assert (
        hours
        == pytest.approx(857_246_208e9 / (0.29 * 989e12) / 3600)
        == pytest.approx(0.83027, rel=1e-4)
    )
    assert planner.device_hours(
        GPT2, 1e9, H100, checkpointing=True
    ) == pytest.approx(hours / 0.75)
    assert planner.device_hours(GPT2, 1e9, H100, loop=True) == pytest.approx(
        hours * 29 / 8
    )


def test_a_pipeline_waits_while_it_fills_and_drains():
    # 64 rows one at a time over 4 stages: 67 beats for 64
    batch = 64 * 1024
    slow = replace(H100, inside=1e15)
    alone, _ = planner.step_seconds(XL, Layout(), slow, batch)
    piped, _ = planner.step_seconds(XL, Layout(pipeline=4), slow, batch)
    assert piped == pytest.approx(alone / 4 * 67 / 64)


def test_the_published_step_of_a_trillion_parameters_is_met_within_a_third():
    # 502 petaflops in all, so 3,072 rows of 2,048 tokens took about 101 s; no interleaved stages here
    batch = 3072 * 2048
    step, traffic = planner.step_seconds(
        MEGATRON, TRILLION, MACHINES["A100"], batch
    )
    work = 8 * 1008e9 * batch
    assert step == pytest.approx(work / 502e15, rel=0.33)
    assert traffic < step


def test_traffic_bounds_a_step():
    slow = replace(H100, inside=1e6, outside=1e6)
    assert planner.plan(GPT2, 1e10, slow, 8).communication == pytest.approx(1)


# the choice --------------------------------------------------------------------------------------

PLANS = [  # shape, tokens, machine, devices, batch: name, GB, s a step, days, kWh, dollars
    (Shape(5e6, 6, 256, 256, 4096), 1e8, "2 CPU cores", 1, 4096,
     "one process", 1.5241105, 1.6159926, 0.45664885, 0.36166589, 1.0959572),
    (replace(GPT2, parameters=110e6, vocabulary=50_000), 2.2e9, "T4", 1, 2**17,
     "one process", 12.55737, 43.146414, 8.3820898, 22.128717, 70.409555),
    (replace(GPT2, parameters=110e6, vocabulary=50_000), 2.2e9, "H100", 1, 2**19,
     "one process", 64.346862, 1.4134922, 0.068662348, 1.812686, 4.6141098),
    (XL, 3e10, "H100", 8, 2**20,
     "DDP over 8", 55.643085, 3.294598, 1.0909925, 230.417611, 586.517555),
    (Shape(6.7e9, 32, 4096, 4096), 1.4e11, "H100", 64, 2**22,
     "FSDP over 8, DDP over 8", 60.674582, 7.726895, 2.985139, 5043.69122, 12838.48675),
    (LARGE, 1.4e12, "H100", 1024, 2**22,
     "tensor 8, FSDP over 128", 55.014417, 4.6821572, 18.088463, 488996.28, 1244717.8),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, tokens, machine, devices, batch, name, gigabytes, step, days, energy, money",
    PLANS,
)
def test_the_plans_of_lesson_12(
    shape,
    tokens,
    machine,
    devices,
    batch,
    name,
    gigabytes,
    step,
    days,
    energy,
    money,
):
    plan = planner.plan(shape, tokens, MACHINES[machine], devices, batch)
    assert plan.layout.name == name
    figures = [plan.memory / 1e9, plan.step, plan.days, plan.energy, plan.money]
    assert figures == pytest.approx(
        [gigabytes, step, days, energy, money], rel=1e-5
    )


def test_energy_and_money_follow_from_the_hours():
    plan = planner.plan(GPT2, 1e10, H100, 8)
    hours = plan.days * 24 * 8
    assert plan.money == pytest.approx(hours * 2.80)
    assert plan.energy == pytest.approx(hours * 1.0 * 1.1)


def card(inside: float, outside: float) -> Machine:
    return Machine("24 GB", 60e12, 24e9, 300, 0.40, inside, outside)


SIZES = {
    "small": Shape(0.5e9, 24, 1024, 2048),
    "middle": Shape(7e9, 32, 4096, 2048),
    "huge": Shape(400e9, 96, 16_384, 2048),
}
MATRIX = {
    (1, 300, 300): ["one process", None, None],
    (8, 300, 300): ["DDP over 8", "tensor 8", None],
    (8, 3, 3): ["DDP over 8", "pipeline 8", None],
    (512, 300, 300): ["DDP over 512", "FSDP over 512", "tensor 8, FSDP over 64"],
    (512, 300, 3 / 8): [
        "DDP over 512",
        "tensor 8, DDP over 64",
        "tensor 8, pipeline 16, FSDP over 4",
    ],
}


@pytest.mark.parametrize("place", MATRIX)
def test_the_matrix_of_lesson_11(place):
    devices, inside, outside = place
    machine = card(inside * 1e9, outside * 1e9)
    for shape, expected in zip(SIZES.values(), MATRIX[place]):
        if expected is None:
            with pytest.raises(CourseError, match="no layout fits"):
                planner.choose_layout(shape, machine, devices, 8192 * devices)
        else:
            layout, reasons = planner.choose_layout(
                shape, machine, devices, 8192 * devices
            )
            assert layout.name == expected
            every = planner.layouts(machine, devices)
            assert 2 * len(reasons) == len(every)


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 12, 64, 1024])
def test_every_layout_uses_every_device_and_shares_evenly(devices):
    for layout in planner.layouts(H100, devices):
        assert layout.devices == devices
        assert layout.data % layout.shards == 0


def test_what_cannot_fit_says_so():
    with pytest.raises(CourseError, match="(?s)too much.*take other devices"):
        planner.choose_layout(LARGE, MACHINES["T4"], 1, 5e5)
    with pytest.raises(CourseError, match="less than one row"):
        planner.choose_layout(GPT2, H100, 1024, 4096)


def test_more_devices_are_never_slower():
    steps = [planner.plan(GPT2, 1e10, H100, n, 2**22).step for n in (1, 8, 64, 512)]
    assert steps == sorted(steps, reverse=True)


def test_more_tokens_make_a_slow_link_fast_enough():
    machine = card(2e9, 2e9)
    shared = Layout(data=8, shards=8, checkpointing=True)
    few = planner.step_seconds(SIZES["middle"], shared, machine, 8 * 4096, 2)
    many = planner.step_seconds(SIZES["middle"], shared, machine, 8 * 65_536, 32)
    # one pass each: 3 * 7/8 * 14e9 bytes at 2e9
    assert few == (pytest.approx(18.375), pytest.approx(18.375))
    assert many[1] == pytest.approx(18.375) and many[0] > 5 * many[1]


def test_a_layout_says_its_name():
    assert Layout().name == "one process"
    assert HYBRID.name == "FSDP over 8, DDP over 2"
    assert TRILLION.name == "tensor 8, pipeline 64, DDP over 6"


# the choice, against every layout there is -----------------------------------------------------------


def every_way(
    shape: Shape, machine: Machine, devices: int, batch: float
) -> list[float]:
    """Seconds of a step by every layout, kept or computed again, with every number of rows that fits."""
    node = min(machine.node, devices)
    times = []
    for tensor, stages, again in product(
        {1, node}, (1, 2, 4, 8, 16), (False, True)
    ):
        data, left = divmod(devices, tensor * stages)
        if left or data == 0 or stages > shape.layers:
            continue
        shared = {1, data} | ({node} if tensor == stages == 1 else set())
        for shards in shared:
            if data % shards:
                continue
            layout = Layout(tensor, stages, data, shards, again)
            for power in range(24):
                rows = 2**power
                needed = planner.memory_per_device(
                    shape, layout, rows, machine.precision
                )
                if (
                    rows * data * shape.context > batch
                    or needed > 0.9 * machine.memory
                ):
                    break
                took, _ = planner.step_seconds(shape, layout, machine, batch, rows)
                times.append(took)
    return times


shapes = st.builds(
    lambda layers, width, context, words: Shape(
        12 * layers * width**2 + words * width, layers, width, context, words
    ),
    layers=st.integers(1, 128),
    width=st.sampled_from([256, 768, 1600, 4096, 8192, 16_384]),
    context=st.sampled_from([256, 1024, 4096, 8192]),
    words=st.sampled_from([1000, 32_768, 128_000]),
)
machines = st.builds(
    lambda flops, memory, inside, outside, node, precision: Machine(
        "any", flops, memory, 300, 1.0, inside, outside, node, precision
    ),
    flops=st.floats(1e12, 1e15),
    memory=st.floats(8e9, 200e9),
    inside=st.floats(1e8, 1e12),
    outside=st.floats(1e8, 1e12),
    node=st.sampled_from([1, 2, 4, 8]),
    precision=st.sampled_from(["float32", "bfloat16"]),
)


@settings(max_examples=150, deadline=None)
@given(shapes, machines, st.integers(1, 1024), st.integers(12, 24))
def test_no_layout_that_fits_is_faster_than_the_choice(
    shape, machine, devices, power
):
    batch = 2.0**power
    times = every_way(shape, machine, devices, batch)
    if times:
        plan = planner.plan(shape, 1e9, machine, devices, batch)
        assert plan.step == min(times)
        assert plan.memory <= 0.9 * machine.memory
    else:
        with pytest.raises(CourseError, match="no layout fits"):
            planner.choose_layout(shape, machine, devices, batch)


def test_a_cut_layer_may_keep_its_activations():
    plan = planner.plan(LARGE, 1.4e12, H100, 1024, 2**22)
    assert plan.layout == Layout(tensor=8, data=128, shards=128)
    assert plan.rows_at_once == 4
    again = replace(plan.layout, checkpointing=True)
    slower, _ = planner.step_seconds(LARGE, again, H100, 2**22, 8)
    assert slower > 1.3 * plan.step


CARDS = [2**power for power in range(11)]
GROWN = {"1.5B": XL, "7B": Shape(6.7e9, 32, 4096, 4096), "70B": LARGE}


@pytest.mark.parametrize("name", GROWN)
def test_plans_are_sane_on_one_to_a_thousand_cards(name):
    shape = GROWN[name]
    batch = 2.0**22
    # What the arithmetic takes at the share of the peak that the class reaches.
    ideal = planner.device_hours(shape, batch, H100) * 3600
    steps = []
    for cards in CARDS:
        try:
            plan = planner.plan(shape, 1e12, H100, cards, batch)
        except CourseError:
            assert not steps, "what fits on fewer cards fits on more"
            # A card cannot hold its share of the states, or nearly so.
            assert 16 * shape.parameters / cards > 0.5 * H100.memory
            continue
        assert ideal <= plan.step * cards * (1 + 1e-9), "faster than the arithmetic"
        assert 16 * shape.parameters / cards < plan.memory < 0.9 * H100.memory
        assert plan.layout.devices == cards
        steps.append(plan.step)
    assert steps == sorted(steps, reverse=True), "more cards are slower"
    assert len(steps) >= {"1.5B": 11, "7B": 9, "70B": 6}[name]
    # A thousand cards are worth more than three hundred perfect ones.
    assert ideal / steps[-1] > 300
