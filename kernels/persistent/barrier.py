"""A barrier of all programs of one launch, which must all run at once: a cooperative launch guarantees or refuses it.

One int32 counter, 0 before the launch and after it: `arrive` adds 1, `wait` returns once it has reached a target, and
the last to `leave` sets it back, so that a captured launch can be replayed. A program may do other work between
arriving and waiting.
"""

from __future__ import annotations

from kernels.triton_support import tl, triton


@triton.jit
def arrive(counter_ptr):
    """Publish what this program's threads have written, and count it as arrived."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait(counter_ptr, target):
    """Return when `target` arrivals are counted: what they published can be read from then on."""
    arrived = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    while arrived < target:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def leave(counter_ptr, arrivals, num_programs):
    """A program's last act, after `arrivals` in all have been counted: nobody waits once the last one is here."""
    left = tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
    if left == arrivals + num_programs - 1:
        tl.store(counter_ptr, 0)
