// One tiny kernel per rule, each wrong in one way; `right` breaks none. All take: in, out, tiling.
#include "kernel_operator.h"

using namespace AscendC;

namespace {

constexpr uint32_t kCount = 16;
constexpr uint32_t kBytes = kCount * sizeof(float);

// A kernel's usual furniture.
struct Frame {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> result;
    TBuf<TPosition::VECCALC> buffer;
    GlobalTensor<float> from, to;

    Frame(GM_ADDR source, GM_ADDR target)
    {
        from.SetGlobalBuffer(reinterpret_cast<float *>(source));
        to.SetGlobalBuffer(reinterpret_cast<float *>(target));
        pipe.InitBuffer(in, 1, kBytes);
        pipe.InitBuffer(result, 1, kBytes);
        pipe.InitBuffer(buffer, kBytes);
    }

    LocalTensor<float> Load()
    {
        LocalTensor<float> local = in.AllocTensor<float>();
        DataCopy(local, from, kCount);
        in.EnQue(local);
        return in.DeQue<float>();
    }

    void Store(const LocalTensor<float> &values)
    {
        LocalTensor<float> local = result.AllocTensor<float>();
        Muls(local, values, 2.0f, static_cast<int32_t>(kCount));
        result.EnQue(local);
        local = result.DeQue<float>();
        DataCopy(to, local, kCount);
        result.FreeTensor(local);
    }
};

}  // namespace

#define KERNEL(name) extern "C" __global__ __aicore__ void name(GM_ADDR source, GM_ADDR target, GM_ADDR)

KERNEL(right)
{
    Frame frame(source, target);
    const LocalTensor<float> values = frame.Load();
    frame.Store(values);
    frame.in.FreeTensor(values);
}

KERNEL(copy_of_odd_bytes)
{
    Frame frame(source, target);
    LocalTensor<float> local = frame.in.AllocTensor<float>();
    DataCopy(local, frame.from, 3);
}

KERNEL(operand_off_its_block)
{
    Frame frame(source, target);
    const LocalTensor<float> values = frame.Load();
    LocalTensor<float> sums = frame.buffer.Get<float>();
    Muls(sums[1], values, 1.0f, 4);
}

KERNEL(more_than_ub_holds)
{
    Frame frame(source, target);
    TBuf<TPosition::VECCALC> large;
    frame.pipe.InitBuffer(large, 184 * 1024);
}

KERNEL(tensor_never_freed)
{
    Frame frame(source, target);
    frame.Store(frame.Load());
}

KERNEL(take_from_an_empty_queue)
{
    Frame frame(source, target);
    frame.in.DeQue<float>();
}

KERNEL(queue_without_alloc)
{
    Frame frame(source, target);
    const LocalTensor<float> values = frame.Load();
    frame.in.EnQue(values);
}

KERNEL(read_before_write)
{
    Frame frame(source, target);
    frame.Store(frame.buffer.Get<float>());
}

KERNEL(past_the_allocation)
{
    Frame frame(source, target);
    LocalTensor<float> local = frame.in.AllocTensor<float>();
    DataCopy(local, frame.from[8], kCount);
}

KERNEL(scalar_read_without_flag)
{
    Frame frame(source, target);
    const LocalTensor<float> values = frame.Load();
    LocalTensor<float> sums = frame.buffer.Get<float>();
    Muls(sums, values, 1.0f, static_cast<int32_t>(kCount));
    frame.in.FreeTensor(values);
    sums.GetValue(0);
}

KERNEL(vector_read_without_queue)
{
    Frame frame(source, target);
    LocalTensor<float> sums = frame.buffer.Get<float>();
    DataCopy(sums, frame.from, kCount);
    frame.Store(sums);
}

KERNEL(wait_for_nothing)
{
    Frame frame(source, target);
    WaitFlag<HardEvent::V_S>(0);
}

KERNEL(flag_left_set)
{
    Frame frame(source, target);
    SetFlag<HardEvent::V_S>(0);
}

KERNEL(unrounded_cast_to_bf16)
{
    Frame frame(source, target);
    const LocalTensor<float> values = frame.Load();
    Cast(frame.buffer.Get<bfloat16_t>(), values, RoundMode::CAST_NONE, kCount);
}

KERNEL(size_of_an_unsized_tensor)
{
    Frame frame(source, target);
    frame.from.GetSize();
}

#ifdef AMPHORA_RULE_BF16
KERNEL(bf16_arithmetic)
{
    Frame frame(source, target);
    LocalTensor<bfloat16_t> values = frame.buffer.Get<bfloat16_t>();
    Add(values, values, values, static_cast<int32_t>(kCount));
}
#endif
