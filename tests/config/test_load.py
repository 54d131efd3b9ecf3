"""A stack file becomes options or one clear line for each thing that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support_backends import STANDARD, CPUTier, DiskTier, GPUTier, Idle, add_distribution, backends_in

from kvtier.config import StackConfig, StackOptions, build_tiers, load_stack, parse_stack, stack_schema
from kvtier.config.plan import TierPlan, plan_stack
from kvtier.errors import ConfigError
from kvtier.options import ADMISSION_BYTES, INDEX_BYTES_PER_SLOT, KeepsRowsFree, OwnedTierOptions
from kvtier.tier.registry import Backends
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef

CPU = "{type: cpu, cpu_bytes_to_use: 1GiB}"
DISK = "type: disk, roots: [/a], capacity: 1TiB"


@pytest.fixture
def backends(tmp_path: Path) -> Backends:
    add_distribution(tmp_path / "site", "tests", STANDARD)
    return backends_in(tmp_path / "site")


def lines(text: str, backends: Backends) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_stack(text, backends)
    return str(caught.value).split("\n")


def test_a_whole_stack_is_read(backends: Backends) -> None:
    config = parse_stack(
        f"""
        namespace: blue
        block_size_factor: 4
        lookup_timeout_seconds: 2
        load_timeout_seconds: 1.5
        tiers:
          - type: gpu
          - {{type: cpu, cpu_bytes_to_use: 64GiB, policy: arc}}
          - {{{DISK}, name: nvme, write_policy: on_evict}}
          - {{{DISK}, min_free_bytes: 4096}}
        """,
        backends,
    )
    gpu, cpu, nvme, disk = config.tiers
    assert (config.namespace, config.block_size_factor) == ("blue", 4)
    assert (config.lookup_timeout_seconds, config.load_timeout_seconds) == (2.0, 1.5)
    assert isinstance(gpu, GPUTier.Options)
    assert isinstance(cpu, CPUTier._Options)
    assert (cpu.cpu_bytes_to_use, cpu.policy) == (64 << 30, "arc")
    assert isinstance(nvme, DiskTier._Options)
    assert (nvme.roots, nvme.capacity, nvme.write_policy) == ((Path("/a"),), 1 << 40, "on_evict")
    assert [tier.label for tier in config.tiers] == ["gpu", "cpu", "nvme", "disk"]
    assert isinstance(disk, DiskTier._Options)
    assert disk.min_free_bytes == 4096


def test_what_is_left_out_takes_sane_defaults(backends: Backends) -> None:
    config = parse_stack(f"tiers: [{CPU}]", backends)
    assert config.model_dump(exclude={"tiers"}) == StackOptions().model_dump()
    assert config.block_size_factor is None
    for timeout in ("lookup", "load", "store", "close"):
        assert 1 <= getattr(config, f"{timeout}_timeout_seconds") <= 120


def test_a_file_is_read_as_its_text(tmp_path: Path, backends: Backends) -> None:
    (tmp_path / "stack.yaml").write_text(f"tiers: [{CPU}]")
    assert load_stack(tmp_path / "stack.yaml", backends) == parse_stack(f"tiers: [{CPU}]", backends)


def test_tiers_are_constructed_from_their_options_and_not_opened(backends: Backends) -> None:
    before = Idle.opened
    config = parse_stack(f"tiers: [{{type: gpu}}, {CPU}, {{{DISK}}}]", backends)
    tiers = build_tiers(config, backends)
    assert [type(tier) for tier in tiers] == [GPUTier, CPUTier, DiskTier]
    assert [tier.options for tier in tiers if isinstance(tier, Idle)] == list(config.tiers)
    assert Idle.opened == before


def test_a_stack_built_by_hand_is_held_to_the_same_rules(backends: Backends) -> None:
    config = StackConfig(tiers=(GPUTier._Options(type="gpu"),))
    with pytest.raises(ConfigError, match="needs a CPU tier"):
        build_tiers(config, backends)


MISTAKES = {
    "unknown key of the stack": (
        f"lookup_timeout: 5\ntiers: [{CPU}]",
        "lookup_timeout: unknown key; did you mean 'lookup_timeout_seconds'?",
    ),
    "unknown key of a tier": (
        "tiers: [{type: cpu, cpu_bytes_to_use: 1GiB, polcy: lru}]",
        "tiers[0].polcy: unknown key; did you mean 'policy'? (known keys: name, cpu_bytes_to_use, policy,",
    ),
    "ten bananas": (
        "tiers: [{type: cpu, cpu_bytes_to_use: 10 bananas}]",
        "tiers[0].cpu_bytes_to_use: '10 bananas' is not a size; write a whole number of bytes or a number with KiB",
    ),
    "no budget": (
        "tiers: [{type: cpu}]",
        "tiers[0].cpu_bytes_to_use: is required (memory for rows, never exceeded); add it",
    ),
    "a negative budget": (
        "tiers: [{type: cpu, cpu_bytes_to_use: -1}]",
        "tiers[0].cpu_bytes_to_use: -1 is not accepted; it should be greater than 0",
    ),
    "no number": ("tiers: [{type: cpu, cpu_bytes_to_use: .5}]", "tiers[0].cpu_bytes_to_use: 0.5 is not a size"),
    "unknown policy": (
        "tiers: [{type: cpu, cpu_bytes_to_use: 1GiB, policy: fifo}]",
        "tiers[0].policy: no policy is called 'fifo' (known: arc, lru",
    ),
    "text for true": (
        "tiers: [{type: cpu, cpu_bytes_to_use: 1GiB, huge_pages: yes}]",
        "tiers[0].huge_pages: 'yes' is not accepted; it should be a valid boolean",
    ),
    "number for text": (
        "namespace: 5\ntiers: [{type: gpu}, " + CPU + "]",
        "namespace: 5 is not accepted; it should be a valid string",
    ),
    "text for a list": (
        f"tiers: [{CPU}, {{type: disk, roots: /a, capacity: 1GiB}}]",
        "tiers[1].roots: '/a' is not accepted; it should be a valid list",
    ),
    "an item of a list": (
        f"tiers: [{CPU}, {{type: disk, roots: [/a, 5], capacity: 1GiB}}]",
        "tiers[1].roots[1]: 5 is not accepted",
    ),
    "an empty list": (
        f"tiers: [{CPU}, {{type: disk, roots: [], capacity: 1GiB}}]",
        "tiers[1].roots: needs at least 1 item(s)",
    ),
    "zero timeout": (
        f"load_timeout_seconds: 0\ntiers: [{CPU}]",
        "load_timeout_seconds: 0 is not accepted; it should be greater than 0",
    ),
    "text for a timeout": (
        f"load_timeout_seconds: soon\ntiers: [{CPU}]",
        "load_timeout_seconds: 'soon' is not accepted",
    ),
    "a number in quotes for a timeout": (
        f'load_timeout_seconds: "5"\ntiers: [{CPU}]',
        "load_timeout_seconds: '5' is not accepted; it should be a valid number",
    ),
    "true for a timeout": (
        f"load_timeout_seconds: true\ntiers: [{CPU}]",
        "load_timeout_seconds: True is not accepted; it should be a valid number",
    ),
    "a number in quotes for a speed": (
        f'prefill_tokens_per_second: "100"\ntiers: [{CPU}]',
        "prefill_tokens_per_second: '100' is not known",
    ),
    "true for a speed": (
        f"prefill_tokens_per_second: true\ntiers: [{CPU}]",
        "prefill_tokens_per_second: True is not known",
    ),
    "a time beyond what the system waits": (
        f"load_timeout_seconds: 1e10\ntiers: [{CPU}]",
        "load_timeout_seconds: 10000000000.0 is not accepted; it should be less than 1",
    ),
    "NUL in a folder": (f'state_dir: "/tmp/\\0"\ntiers: [{CPU}]', "state_dir: '/tmp/\\x00' is not accepted"),
    "NUL in a socket": (f'stats_socket: "/tmp/\\0"\ntiers: [{CPU}]', "stats_socket: '/tmp/\\x00' is not accepted"),
    "NUL in a trace": (
        f'record: {{folder: "/tmp/\\0"}}\ntiers: [{CPU}]',
        "record.folder: '/tmp/\\x00' is not accepted",
    ),
    "factor zero": (
        f"block_size_factor: 0\ntiers: [{CPU}]",
        "block_size_factor: 0 is not accepted; it should be greater than or equal to 1",
    ),
    "bad name": ("tiers: [{type: cpu, name: 'a b', cpu_bytes_to_use: 1GiB}]", "tiers[0].name: 'a b' is not accepted"),
    "unknown type": (
        f"tiers: [{CPU}, {{type: dsk}}]",
        "tiers[1].type: no backend is called 'dsk'; did you mean 'disk'? (known: cpu, disk, gpu, probed)",
    ),
    "a module for a type": ("tiers: [{type: 'os.path:join'}]", "tiers[0].type: no backend is called 'os.path:join'"),
    "no type": (
        "tiers: [{cpu_bytes_to_use: 1GiB}]",
        "tiers[0].type: is required; write one of: cpu, disk, gpu, probed",
    ),
    "type of the wrong kind": ("tiers: [{type: [cpu]}]", "tiers[0].type: a list is not a backend's name; write one of"),
    "a tier that is text": (
        "tiers: [cpu]",
        "tiers[0]: 'cpu' is no tier; write a mapping with a type (cpu, disk, gpu, probed)",
    ),
    "tiers that are a mapping": ("tiers: {type: cpu}", "tiers: must be a list of at least one tier"),
    "no tiers in the list": ("tiers: []", "tiers: must be a list of at least one tier"),
    "tiers left empty": ("tiers:", "tiers: must be a list of at least one tier"),
    "gpu second": (f"tiers: [{CPU}, {{type: gpu}}]", "tiers[1]: the GPU tier comes first, once"),
    "two gpus": (f"tiers: [{{type: gpu}}, {{type: gpu, name: b}}, {CPU}]", "tiers[1]: the GPU tier comes first, once"),
    "no cpu": ("tiers: [{type: gpu}]", "tiers: a stack needs a CPU tier; add `- type: cpu`"),
    "two cpus": (
        f"tiers: [{CPU}, {{type: cpu, name: b, cpu_bytes_to_use: 1GiB}}]",
        "tiers[1]: a stack has exactly one CPU tier",
    ),
    "cpu below the disk": (f"tiers: [{{{DISK}}}, {CPU}]", "tiers[1]: the CPU tier comes before every lower tier"),
    "nine below the cpu": (
        f"tiers: [{CPU}, {', '.join(f'{{{DISK}, name: d{i}}}' for i in range(9))}]",
        "tiers[9]: a stack has at most 8 tiers below the CPU tier",
    ),
    "one name twice": (
        f"tiers: [{CPU}, {{{DISK}}}, {{{DISK}}}]",
        "tiers[2].name: 'disk' is already the name of tiers[1]; give one its own",
    ),
    "on_evict far below": (
        f"tiers: [{CPU}, {{{DISK}}}, {{{DISK}, name: b, write_policy: on_evict}}]",
        "tiers[2].write_policy: on_evict is only for the tier directly below the CPU tier",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_in_one_line_with_the_path_of_its_key_and_what_to_do(case: str, backends: Backends) -> None:
    text, expected = MISTAKES[case]
    (line,) = lines(text, backends)
    assert line.startswith(expected)


@pytest.mark.parametrize("given", ["'0.5'", "true"])
def test_a_number_of_a_tier_is_no_text_and_no_boolean(given: str) -> None:
    cpu, disk = "type: cpu, cpu_bytes_to_use: 1GiB", "type: fs, roots: [/a], capacity: 1GiB"
    wrong = (
        f"{{{cpu}, free_watermark: {given}}}, {{{disk}, owner_timeout_seconds: {given}, job_timeout_seconds: {given}}}"
    )
    with pytest.raises(ConfigError) as caught:
        parse_stack(f"tiers: [{wrong}]")
    assert str(caught.value).count("is not accepted; it should be a valid number") == 3
    numbers = parse_stack(f"tiers: [{wrong.replace(given, '0.5')}]").tiers
    assert isinstance(numbers[0], KeepsRowsFree)
    assert numbers[0].free_watermark == 0.5


@pytest.mark.parametrize("text", ["", "just text", "[1, 2]", "5"])
def test_a_document_that_is_no_mapping_is_refused(text: str, backends: Backends) -> None:
    assert lines(text, backends) == ["a stack file is a mapping with the key 'tiers'"]


def test_a_misspelt_tiers_is_named(backends: Backends) -> None:
    found = lines(f"tier: [{CPU}]", backends)
    assert any(line.startswith("tiers: is required; did you mean 'tier'?") for line in found)
    assert any(line.startswith("tier: unknown key") for line in found)


def test_every_mistake_is_reported_at_once_one_a_line(backends: Backends) -> None:
    found = lines(
        """
        namespce: blue
        tiers:
          - {type: gpu, devce: auto}
          - {type: cpu, cpu_bytes_to_use: 10 bananas, policy: fifo}
          - {type: tape}
        """,
        backends,
    )
    assert [line.partition(": ")[0] for line in found] == [
        "namespce",
        "tiers[0].devce",
        "tiers[1].cpu_bytes_to_use",
        "tiers[1].policy",
        "tiers[2].type",
    ]


def test_a_single_mistake_carries_its_path(backends: Backends) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stack("tiers: [{type: cpu, cpu_bytes_to_use: 0}]", backends)
    assert caught.value.path == "tiers[0].cpu_bytes_to_use"


def test_a_long_or_many_line_value_is_shortened_to_one_line(backends: Backends) -> None:
    (line,) = lines(f'tiers: [{{type: cpu, cpu_bytes_to_use: 1GiB, huge_pages: "{"x" * 500}\\n"}}]', backends)
    assert len(line) < 200
    (line,) = lines('tiers: [{type: cpu, cpu_bytes_to_use: "10\\nGiB"}]', backends)
    assert line.startswith("tiers[0].cpu_bytes_to_use: '10\\nGiB' is not a size")


def test_the_schema_has_one_alternative_for_each_installed_backend(backends: Backends) -> None:
    schema = stack_schema(backends)
    alternatives = schema["properties"]["tiers"]["items"]["oneOf"]
    assert [tier["properties"]["type"] for tier in alternatives] == [
        {"const": name} for name in ("cpu", "disk", "gpu", "probed")
    ]
    assert all("type" in tier["required"] and tier["additionalProperties"] is False for tier in alternatives)
    assert "cpu_bytes_to_use" in alternatives[0]["required"]
    assert schema["required"] == ["tiers"]
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"tiers", *StackOptions.model_fields}


LAYOUT = KVLayout(
    (GroupLayout((TensorRef(0, 3000),), 16), GroupLayout((TensorRef(1, 1000),), 16, GroupKind.SLIDING_WINDOW, 512)),
    world_size=2,
    block_size_factor=4,
)


def test_the_plan_of_a_stack_is_its_arithmetic(backends: Backends) -> None:
    config = parse_stack(f"tiers: [{{type: gpu}}, {{type: cpu, cpu_bytes_to_use: 1MiB}}, {{{DISK}}}]", backends)
    tiers = build_tiers(config, backends)
    plan, problems = plan_stack(tiers, LAYOUT)
    assert not problems
    assert (plan.alignment, plan.row_bytes) == (4096, 24576)
    assert [(group.padding_bytes, group.aligned_bytes) for group in plan.groups] == [(576, 24576), (16576, 8192)]
    assert plan.groups[1].waste == pytest.approx(16576 / 24576)
    gpu, cpu, disk = plan.tiers
    assert (gpu.num_blocks, gpu.tokens, gpu.index_bytes) == (None, None, None)
    rows = (1 << 20) // 24576
    # Every 64 tokens take one row in each of the two groups.
    assert (cpu.num_blocks, cpu.tokens, cpu.index_bytes) == (rows, rows * 64 // 2, rows * INDEX_BYTES_PER_SLOT)
    assert disk.num_blocks == (1 << 40) // 24576
    assert (disk.write_policy, disk.mode) == ("write_through", "")


def test_a_backend_with_a_dry_run_is_believed(backends: Backends) -> None:
    text = f"tiers: [{CPU}, {{type: probed, roots: [/a], capacity: 8MiB}}]"
    config = parse_stack(text, backends)
    plan, _ = plan_stack(build_tiers(config, backends), LAYOUT, (1, 12288), probe=True)
    assert (plan.alignment, plan.row_bytes) == (12288, 24576)
    disk = plan.tiers[1]
    by_group = [8 * ((1 << 20) // (4096 + size)) for size in (24576, 12288)]
    tokens = 64 / sum(1 / slots for slots in by_group)
    assert disk.tokens == int(tokens)
    assert disk.num_blocks == int(tokens / 64 * 2)
    assert disk.mode == "direct"
    assert disk.index_bytes == 8 * ((1 << 20) // (4096 + 12288)) * INDEX_BYTES_PER_SLOT


def test_the_memory_of_first_uses_is_index_memory(backends: Backends) -> None:
    def disk(more: str) -> TierPlan:
        config = parse_stack(f"tiers: [{CPU}, {{{DISK}, {more}}}]", backends)
        plan, _ = plan_stack(build_tiers(config, backends), LAYOUT)
        return plan.tiers[1]

    every, second = disk("admit: always").index_bytes, disk("admit: second_use").index_bytes
    assert every is not None
    assert second == every + ADMISSION_BYTES


def test_the_bound_of_the_index_holds_with_an_admission_too() -> None:
    options = OwnedTierOptions.model_validate({"type": "disk", "index_bytes_max": "5MiB"})
    assert options.index_slots_max == (5 << 20) // INDEX_BYTES_PER_SLOT
    options = OwnedTierOptions.model_validate({"type": "disk", "index_bytes_max": "5MiB", "admit": "second_use"})
    assert options.index_slots_max == (1 << 20) // INDEX_BYTES_PER_SLOT
    with pytest.raises(ValidationError, match="no room for a slot with admit: second_use, which needs 4194524"):
        OwnedTierOptions.model_validate({"type": "disk", "index_bytes_max": "4MiB", "admit": "second_use"})


@pytest.mark.parametrize(
    ("tier", "key"),
    [
        ("{type: cpu, cpu_bytes_to_use: 24575}", "tiers[0].cpu_bytes_to_use"),
        (f"{CPU}, {{type: disk, roots: [/a], capacity: 24575}}", "tiers[1].capacity"),
    ],
)
def test_a_budget_under_one_block_names_the_bytes_needed(tier: str, key: str, backends: Backends) -> None:
    config = parse_stack(f"tiers: [{tier}]", backends)
    tiers = build_tiers(config, backends)
    _, (problem,) = plan_stack(tiers, LAYOUT, (4096,) * len(tiers))
    assert problem.path == key
    assert "24575 bytes hold no block: one block needs 24576 bytes" in str(problem)


def test_a_bad_place_is_a_problem_only_when_places_are_looked_at(backends: Backends) -> None:
    config = parse_stack(f"tiers: [{CPU}, {{type: probed, roots: [/x/bad], capacity: 8MiB}}]", backends)
    tiers = build_tiers(config, backends)
    _, problems = plan_stack(tiers, LAYOUT, (1, 4096), probe=True)
    assert [str(problem) for problem in problems] == ["tiers[1]: /x/bad: does not exist; create it"]
    assert not plan_stack(tiers, LAYOUT, (1, 4096))[1]
