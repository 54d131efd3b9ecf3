"""An engine at a `kvtier serve`: it stores four blocks, or loads them where an engine before it has stored them.

Start `kvtier serve STACK.yaml --socket PATH`, then twice: python examples/engine_at_service.py PATH
"""

import sys

import torch

import kvtier

BLOCK_BYTES = 4096


def main(service: str) -> None:
    """Print whether the blocks were stored or loaded."""
    layout = kvtier.KVLayout.of_pages(BLOCK_BYTES, block_size=16)
    namespace = kvtier.Namespace(layout, model="demo")  # all that decides what the bytes mean
    gpu_blocks = torch.zeros((4, BLOCK_BYTES), dtype=torch.uint8)
    keys = kvtier.block_keys([f"prefix up to block {number}".encode() for number in range(4)])
    right = torch.arange(4, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES).reshape(4, BLOCK_BYTES)
    with kvtier.connect_engine_stack(service, namespace, [gpu_blocks], engine_id="example") as stack:

        def end(job: kvtier.JobId) -> bool:
            """Step until the job has ended: true if all its blocks were stored or loaded."""
            while True:
                for result in stack.step():
                    if result.job_id == job:
                        return result.ok
                stack.wait(1.0)

        if end(stack.submit_load(keys, gpu_blocks=range(4))):
            assert torch.equal(gpu_blocks, right)
            print("loaded")
            return
        gpu_blocks.copy_(right)
        assert end(stack.submit_store(keys, gpu_blocks=range(4)))
        print("stored")


if __name__ == "__main__":
    main(sys.argv[1])
