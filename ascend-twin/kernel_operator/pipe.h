// TPipe, queues and buffers: who owns a piece of UB, and the flags that order the pipes.
#pragma once

#include "tensor.h"

namespace AscendC {

template <HardEvent event>
inline void SetFlag(int32_t id)
{
    Core &core = ThisCore();
    if (id < 0 || id >= static_cast<int32_t>(kEventIds)) {
        Break("SetFlag with event id %d of %u", id, kEventIds);
    }
    bool &set = core.flag_set[static_cast<int>(event)][id];
    if (set) {
        Break("SetFlag sets event id %d again before anything waited for it", id);
    }
    set = true;
    core.flag_clock[static_cast<int>(event)][id] = core.clocks[PipesOf(event).from];
}

template <HardEvent event>
inline void WaitFlag(int32_t id)
{
    Core &core = ThisCore();
    if (id < 0 || id >= static_cast<int32_t>(kEventIds) || !core.flag_set[static_cast<int>(event)][id]) {
        Break("WaitFlag on event id %d, which nobody set: the core would wait for ever", id);
    }
    core.flag_set[static_cast<int>(event)][id] = false;
    core.Wait(PipesOf(event).to, core.flag_clock[static_cast<int>(event)][id]);
}

template <pipe_t pipe>
inline void PipeBarrier()
{
    if constexpr (pipe == PIPE_ALL) {
        Core &core = ThisCore();
        Clock all;
        for (const Clock &clock : core.clocks) {
            all.Join(clock);
        }
        for (Clock &clock : core.clocks) {
            clock = all;
        }
    }
    // Within one pipe the emulation runs in order as it is.
}

template <TPosition position, int32_t depth>
class TQue;
template <TPosition position>
class TBuf;

class TPipe {
public:
    TPipe()
    {
        if (ThisCore().pipes_alive++ != 0) {
            Break("a second TPipe while one is alive");
        }
    }

    ~TPipe()
    {
        --ThisCore().pipes_alive;
    }

    TPipe(const TPipe &) = delete;
    TPipe &operator=(const TPipe &) = delete;

    template <TPosition position, int32_t depth>
    bool InitBuffer(TQue<position, depth> &queue, uint8_t count, uint32_t bytes)
    {
        bytes = RoundUp(bytes);
        if (count == 0 || count > kMaxBuffers) {
            Break("InitBuffer of %u buffers", count);
        }
        queue.Own(Take(count, bytes), count, bytes);
        return true;
    }

    template <TPosition position>
    bool InitBuffer(TBuf<position> &buffer, uint32_t bytes)
    {
        bytes = RoundUp(bytes);
        buffer.Own(Take(1, bytes), bytes);
        return true;
    }

    // An id that no flag of this kind is using.
    TEventID FetchEventID(HardEvent event)
    {
        const Core &core = ThisCore();
        for (uint32_t id = 0; id < kEventIds; ++id) {
            if (!core.flag_set[static_cast<int>(event)][id]) {
                return static_cast<TEventID>(id);
            }
        }
        Break("all %u event ids of a pipe pair are set", kEventIds);
    }

private:
    static uint32_t RoundUp(uint32_t bytes)
    {
        return (bytes + kUbBlock - 1) / kUbBlock * kUbBlock;
    }

    static uint32_t Take(uint32_t count, uint32_t bytes)
    {
        Core &core = ThisCore();
        const uint64_t wanted = static_cast<uint64_t>(count) * bytes;
        if (core.ub_used + wanted > kUbUsable) {
            Break("InitBuffer: %llu bytes beside %u in use leave the %u bytes of UB",
                  static_cast<unsigned long long>(wanted), core.ub_used, kUbUsable);
        }
        core.buffers += count;
        if (core.buffers > kMaxBuffers) {
            Break("InitBuffer: more than %u buffers", kMaxBuffers);
        }
        const uint32_t offset = core.ub_used;
        core.ub_used += static_cast<uint32_t>(wanted);
        return offset;
    }
};

// A ring of buffers between two pipes: MTE2 to V for VECIN, V to MTE3 for VECOUT. Each buffer goes
// free → allocated → queued → taken → free, and each hand-over is a wait.
template <TPosition position, int32_t depth>
class TQue {
    static_assert(position == TPosition::VECIN || position == TPosition::VECOUT, "vector queues only");
    static constexpr Pipe kProducer = position == TPosition::VECIN ? kIn : kVector;
    static constexpr Pipe kConsumer = position == TPosition::VECIN ? kVector : kOut;
    enum class State : uint8_t { kFree, kAllocated, kQueued, kTaken };

public:
    // A destructor may not throw: the launch looks at the core when the kernel has returned.
    ~TQue()
    {
        for (const Slot &slot : slots_) {
            ThisCore().tensor_left |= slot.state != State::kFree;
        }
    }

    template <typename T>
    LocalTensor<T> AllocTensor()
    {
        Core &core = ThisCore();
        for (Slot &slot : slots_) {
            if (slot.state == State::kFree) {
                slot.state = State::kAllocated;
                core.Wait(kProducer, slot.clock);
                core.Forget(slot.offset, bytes_);
                return LocalTensor<T>(slot.offset, bytes_);
            }
        }
        Break("AllocTensor: all %zu buffers of the queue are in use", slots_.size());
    }

    template <typename T>
    bool EnQue(const LocalTensor<T> &tensor)
    {
        Slot &slot = Find(tensor.Offset(), State::kAllocated, "EnQue of a tensor that is not allocated");
        if (queued_.size() >= static_cast<size_t>(depth)) {
            Break("EnQue: the queue of depth %d is full", depth);
        }
        slot.state = State::kQueued;
        slot.clock = ThisCore().clocks[kProducer];
        queued_.push_back(slot.offset);
        return true;
    }

    template <typename T>
    LocalTensor<T> DeQue()
    {
        if (queued_.empty()) {
            Break("DeQue of an empty queue");
        }
        Slot &slot = Find(queued_.front(), State::kQueued, "DeQue of a tensor that was not queued");
        queued_.erase(queued_.begin());
        slot.state = State::kTaken;
        ThisCore().Wait(kConsumer, slot.clock);
        return LocalTensor<T>(slot.offset, bytes_);
    }

    template <typename T>
    void FreeTensor(const LocalTensor<T> &tensor)
    {
        Slot &slot = Find(tensor.Offset(), State::kTaken, "FreeTensor of a tensor that was not taken out");
        slot.state = State::kFree;
        slot.clock = ThisCore().clocks[kConsumer];
    }

    void Own(uint32_t offset, uint32_t count, uint32_t bytes)
    {
        bytes_ = bytes;
        for (uint32_t i = 0; i < count; ++i) {
            slots_.push_back({offset + i * bytes, State::kFree, Clock()});
        }
    }

private:
    struct Slot {
        uint32_t offset;
        State state;
        Clock clock;
    };

    Slot &Find(uint32_t offset, State state, const char *rule)
    {
        for (Slot &slot : slots_) {
            if (slot.offset == offset) {
                if (slot.state != state) {
                    Break("%s", rule);
                }
                return slot;
            }
        }
        Break("%s", rule);
    }

    std::vector<Slot> slots_;
    std::vector<uint32_t> queued_;
    uint32_t bytes_ = 0;
};

// A buffer without a queue: waits are the kernel's own.
template <TPosition position>
class TBuf {
public:
    template <typename T>
    LocalTensor<T> Get()
    {
        return LocalTensor<T>(offset_, bytes_);
    }

    template <typename T>
    LocalTensor<T> Get(uint32_t elements)
    {
        if (elements * sizeof(T) > bytes_) {
            Break("TBuf::Get of %u elements from %u bytes", elements, bytes_);
        }
        return LocalTensor<T>(offset_, elements * static_cast<uint32_t>(sizeof(T)));
    }

    void Own(uint32_t offset, uint32_t bytes)
    {
        offset_ = offset;
        bytes_ = bytes;
    }

private:
    uint32_t offset_ = 0;
    uint32_t bytes_ = 0;
};

}  // namespace AscendC
