import torch

from srt.kernels.huge_pages import ALIGNMENT, HUGE_PAGE, Arena, zeros


def test_zeros_are_zero_and_writable():
    for size in (0, 1, HUGE_PAGE - 1, HUGE_PAGE + 5):
        memory = zeros(size)
        assert memory.dtype == torch.uint8
        assert memory.shape == (size,)
        assert not memory.any()
        memory.fill_(1)


def test_tensors_of_an_arena_do_not_overlap():
    arena = Arena(block=4096)
    shapes = [(3, 5), (0, 4), (1000,), (7, 11), (2000,), (5000,)]  # some need a block of their own
    tensors = [arena.zeros(shape, torch.bfloat16) for shape in shapes]
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape
        assert (tensor == number).all()
