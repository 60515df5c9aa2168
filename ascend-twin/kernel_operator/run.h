// Runs a kernel on one emulated core. Every kernel binary carries this entry; the launch calls it,
// once for each core, from as many threads as it likes.
#pragma once

#include "vector.h"

namespace AscendC {

constexpr uint32_t kMaxArguments = 16;

template <typename... A>
inline void Invoke(void *entry, uint8_t *const *arguments, uint32_t left, uint32_t at, A... given)
{
    if (left == 0) {
        reinterpret_cast<void (*)(A...)>(entry)(given...);
    } else if constexpr (sizeof...(A) < kMaxArguments) {
        Invoke(entry, arguments, left - 1, at + 1, given..., arguments[at]);
    } else {
        Break("a kernel of more than %u arguments", kMaxArguments);
    }
}

inline void CheckEnd(const Core &core)
{
    if (core.tensor_left) {
        Break("the kernel ended with a queue's tensor not freed");
    }
    for (const auto &event : core.flag_set) {
        for (const bool set : event) {
            if (set) {
                Break("the kernel ended with a flag set that nobody waited for");
            }
        }
    }
}

}  // namespace AscendC

// 0, or 1 with the broken rule in `message`.
extern "C" __attribute__((visibility("default"), used, weak)) int
amphora_twin_run(void *entry, uint8_t *const *arguments, uint32_t count, const AmphoraTwinHost *host,
                 uint32_t block, uint32_t blocks, char *message, uint64_t room)
{
    AscendC::Core core(host, block, blocks);
    AscendC::Current() = &core;
    int broken = 0;
    try {
        AscendC::Invoke(entry, arguments, count, 0);
        AscendC::CheckEnd(core);
    } catch (const AscendC::Fault &fault) {
        std::snprintf(message, room, "core %u: %s", block, fault.text);
        broken = 1;
    }
    AscendC::Current() = nullptr;
    return broken;
}
