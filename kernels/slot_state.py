"""What a step reads of the state that is kept for each slot, and what it changes there: one kernel each, or torch.

A slot is a row of the state; a sequence has one while it runs. One slot more has num_computed -1: padding, which fills
up batches of a fixed size, may occur many times in a batch, and is never counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.random_stream import uniform, uniform_in_kernel
from kernels.triton_support import next_power_of_2, on_device, tl, triton

# Columns of the block table that one turn copies: four int32 for each of four warps' threads, twice.
MAX_TILE = 1024


class SlotState(Protocol):
    """num_computed [slots] int64: tokens whose KV is written, -1 for padding. newest [slots] int64: the token to run
    next. block_table [slots, max_blocks] int32, rows contiguous. temperature, top_p [slots] float64, top_k, seed
    [slots] int64, contiguous. All on one device.
    """

    num_computed: Tensor
    newest: Tensor
    block_table: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor


@dataclass(frozen=True)
class DecodeRows:
    """One token a row, all on the device, so that a CUDA graph can replay it.

    input_ids, positions, slot_mapping: [rows] int64; block_table: [rows, max_blocks] int32, of which entries past the
    row's context may hold anything; context_lens: [rows] int32, the new token included. Padding rows have position 0,
    slot_mapping -1 and context 0.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    context_lens: Tensor


@dataclass(frozen=True)
class DrawSettings:
    """How each row is sampled. temperature, top_p: [rows] float64; top_k: [rows] int64; uniform: [rows] float64, the
    random number of the token that the row samples now, drawn from its own stream."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniform: Tensor


def start_decodes(
    state: SlotState, slots: Tensor, block_size: int, *, drawn: bool, use_triton: bool
) -> tuple[DecodeRows, DrawSettings | None]:
    """The next token of each slot as a row to run, which is counted in state.num_computed at once.

    slots: [rows] int64, each once, but for padding. drawn: also the settings of the rows, as draw_settings gives them.
    """
    _check(state, slots)
    if use_triton:
        return _start_by_triton(state, slots, block_size, drawn)
    start = state.num_computed[slots]
    is_padding = start < 0
    positions = start.clamp(min=0)
    rows = DecodeRows(
        input_ids=state.newest[slots],
        positions=positions,
        slot_mapping=slot_mapping(state, slots, positions, block_size).masked_fill_(is_padding, -1),
        block_table=state.block_table[slots],
        context_lens=(start + 1).int(),
    )
    state.num_computed[slots] = torch.where(is_padding, start, start + 1)
    return rows, draw_settings(state, slots, use_triton=False) if drawn else None


def draw_settings(state: SlotState, slots: Tensor, *, use_triton: bool) -> DrawSettings:
    """The settings of the slots [rows] int64, whose num_computed counts the tokens that lead to what is drawn."""
    _check(state, slots)
    if not use_triton:
        drawn_from = uniform(state.seed[slots], state.num_computed[slots])
        return DrawSettings(state.temperature[slots], state.top_k[slots], state.top_p[slots], drawn_from)
    settings = _new_settings(state, len(slots))
    if len(slots):
        with on_device(slots):
            _draw_settings_kernel[(len(slots),)](
                slots, state.num_computed, *_settings_arguments(state, settings), num_warps=1
            )
    return settings


def keep_newest(state: SlotState, slots: Tensor, token_ids: Tensor, *, use_triton: bool) -> None:
    """newest[slots] = token_ids, [rows] int64 each; 0 where a row has none (-1)."""
    _check(state, slots)
    if token_ids.shape != slots.shape or token_ids.dtype != torch.int64:
        raise ValueError(
            f"token_ids must be [{len(slots)}] int64, got shape {tuple(token_ids.shape)} {token_ids.dtype}"
        )
    if not use_triton:
        state.newest[slots] = token_ids.clamp(min=0)
    elif len(slots):
        with on_device(slots):
            _keep_newest_kernel[(len(slots),)](slots, token_ids.contiguous(), state.newest, num_warps=1)


def slot_mapping(state: SlotState, slots: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[tokens] int64: where each token, of its slot's sequence, writes its KV: block * block_size + offset."""
    return state.block_table[slots, positions // block_size].long() * block_size + positions % block_size


def _check(state: SlotState, slots: Tensor) -> None:
    if slots.dim() != 1 or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(
            f"slots must be [rows] int64, contiguous, got shape {tuple(slots.shape)} {slots.dtype}, "
            f"strides {slots.stride()}"
        )
    if slots.device != state.newest.device:
        raise ValueError(f"slots are on {slots.device}, the state is on {state.newest.device}")


def _start_by_triton(
    state: SlotState, slots: Tensor, block_size: int, drawn: bool
) -> tuple[DecodeRows, DrawSettings | None]:
    num_rows, max_blocks = len(slots), state.block_table.shape[1]
    rows = DecodeRows(
        input_ids=slots.new_empty(num_rows),
        positions=slots.new_empty(num_rows),
        slot_mapping=slots.new_empty(num_rows),
        block_table=state.block_table.new_empty((num_rows, max_blocks)),
        context_lens=slots.new_empty(num_rows, dtype=torch.int32),
    )
    settings = _new_settings(state, num_rows) if drawn else None
    if num_rows:
        with on_device(slots):
            _start_decodes_kernel[(num_rows,)](
                slots,
                state.num_computed,
                state.newest,
                state.block_table,
                state.block_table.stride(0),
                rows.input_ids,
                rows.positions,
                rows.slot_mapping,
                rows.context_lens,
                rows.block_table,
                max_blocks,
                *_settings_arguments(state, settings),
                BLOCK_SIZE=block_size,
                TILE=min(MAX_TILE, next_power_of_2(max_blocks)),
                DRAWN=drawn,
                num_warps=4,
            )
    return rows, settings


def _new_settings(state: SlotState, num_rows: int) -> DrawSettings:
    columns = (state.temperature, state.top_k, state.top_p, state.temperature)
    return DrawSettings(*(column.new_empty(num_rows) for column in columns))


def _settings_arguments(state: SlotState, settings: DrawSettings | None) -> tuple[Any, ...]:
    kept = (state.temperature, state.top_k, state.top_p, state.seed)
    if settings is None:
        return (*kept, *kept)  # what is not drawn is neither read nor written
    return (*kept, settings.temperature, settings.top_k, settings.top_p, settings.uniform)


@triton.jit
def _copy_settings(
    slot,
    row,
    counter,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    row_temperature_ptr,
    row_top_k_ptr,
    row_top_p_ptr,
    row_uniform_ptr,
):
    tl.store(row_temperature_ptr + row, tl.load(temperature_ptr + slot))
    tl.store(row_top_k_ptr + row, tl.load(top_k_ptr + slot))
    tl.store(row_top_p_ptr + row, tl.load(top_p_ptr + slot))
    tl.store(row_uniform_ptr + row, uniform_in_kernel(tl.load(seed_ptr + slot), counter))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _start_decodes_kernel(
    slots_ptr,
    num_computed_ptr,
    newest_ptr,
    table_ptr,
    stride_table_slot,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    row_table_ptr,
    max_blocks,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    row_temperature_ptr,
    row_top_k_ptr,
    row_top_p_ptr,
    row_uniform_ptr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    DRAWN: tl.constexpr,
):
    """One row a program, which alone reads and counts its slot's num_computed."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    start = tl.load(num_computed_ptr + slot)
    token = tl.load(newest_ptr + slot)
    is_real = start >= 0
    context = start + 1  # of padding 0
    # A place past the table would be another slot's: there is none, so nothing is written there.
    place = tl.where(is_real, start // BLOCK_SIZE, 0)
    is_written = is_real & (place < max_blocks)
    table = table_ptr + slot * stride_table_slot
    block = tl.load(table + place, mask=is_written, other=0).to(tl.int64)
    tl.store(input_ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.where(is_real, start, 0))
    tl.store(slot_mapping_ptr + row, tl.where(is_written, block * BLOCK_SIZE + start % BLOCK_SIZE, -1))
    tl.store(context_lens_ptr + row, context.to(tl.int32))
    if DRAWN:
        _copy_settings(
            slot,
            row,
            tl.where(is_real, context, start),
            temperature_ptr,
            top_k_ptr,
            top_p_ptr,
            seed_ptr,
            row_temperature_ptr,
            row_top_k_ptr,
            row_top_p_ptr,
            row_uniform_ptr,
        )
    num_blocks = tl.minimum((context + BLOCK_SIZE - 1) // BLOCK_SIZE, max_blocks).to(tl.int32)
    columns = tl.arange(0, TILE)
    row_table = row_table_ptr + row * max_blocks
    for first in range(0, num_blocks, TILE):
        used = first + columns < num_blocks
        tl.store(row_table + first + columns, tl.load(table + first + columns, mask=used), mask=used)
    tl.debug_barrier()  # one thread counts what every thread has read
    tl.store(num_computed_ptr + slot, context, mask=is_real)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _draw_settings_kernel(
    slots_ptr,
    num_computed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    row_temperature_ptr,
    row_top_k_ptr,
    row_top_p_ptr,
    row_uniform_ptr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    _copy_settings(
        slot,
        row,
        tl.load(num_computed_ptr + slot),
        temperature_ptr,
        top_k_ptr,
        top_p_ptr,
        seed_ptr,
        row_temperature_ptr,
        row_top_k_ptr,
        row_top_p_ptr,
        row_uniform_ptr,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "token_ids_ptr"])
def _keep_newest_kernel(slots_ptr, token_ids_ptr, newest_ptr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ids_ptr + row)
    tl.store(newest_ptr + tl.load(slots_ptr + row), tl.maximum(token, 0))
