// One emulated vector core: its UB, what each byte of it holds, how far each pipe knows the others to
// be, and what a broken rule does.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "types.h"

// What the process around a kernel lends it.
struct AmphoraTwinHost {
    // Whether [address, address + bytes) lies in one device allocation.
    int (*in_device_memory)(const void *context, const void *address, uint64_t bytes);
    const void *context;
};

namespace AscendC {

constexpr uint32_t kUbBytes = 192 * 1024;
// The framework keeps some of UB to itself; how much is not documented, so the twin is on the safe side.
constexpr uint32_t kUbUsable = 184 * 1024;
constexpr uint32_t kUbBlock = 32;
constexpr uint32_t kMaxBuffers = 64;
constexpr uint32_t kEventIds = 8;
// All ones: a NaN in every floating-point type, and no valid index.
constexpr uint8_t kPoison = 0xff;

struct Fault {
    char text[240];
};

[[noreturn]] inline void Break(const char *rule, ...)
{
    Fault fault;
    va_list arguments;
    va_start(arguments, rule);
    std::vsnprintf(fault.text, sizeof fault.text, rule, arguments);
    va_end(arguments);
    throw fault;
}

// How many instructions of each pipe are known to be done.
struct Clock {
    uint32_t of[kPipes] = {};

    void Join(const Clock &other)
    {
        for (int p = 0; p < kPipes; ++p) {
            of[p] = of[p] > other.of[p] ? of[p] : other.of[p];
        }
    }
};

// Who touched a block of UB last: the hazards that flags exist for.
struct BlockUse {
    uint8_t writer = kPipes;  // kPipes: nobody
    uint32_t written = 0;
    uint32_t read[kPipes] = {};
};

inline const char *PipeName(int pipe)
{
    static const char *const names[] = {"S", "V", "MTE2", "MTE3"};
    return names[pipe];
}

class Core {
public:
    Core(const AmphoraTwinHost *lent, uint32_t block, uint32_t blocks)
        : host(lent), block_index(block), block_count(blocks), ub(kUbBytes, kPoison), known(kUbBytes, 0),
          uses(kUbBytes / kUbBlock)
    {
    }

    // An instruction begins on `pipe`; everything it touches carries this number.
    void Issue(Pipe pipe)
    {
        ++clocks[pipe].of[pipe];
    }

    void Read(Pipe pipe, uint32_t offset, uint32_t bytes, const char *what)
    {
        Inside(offset, bytes, what);
        const void *unknown = std::memchr(&known[offset], 0, bytes);
        if (unknown != nullptr) {
            Break("%s reads UB byte %zu, which nothing has written since its buffer was allocated", what,
                  static_cast<size_t>(static_cast<const uint8_t *>(unknown) - known.data()));
        }
        ForBlocks(offset, bytes, [&](BlockUse &use) {
            AfterWrite(pipe, use, what, "reads");
            use.read[pipe] = clocks[pipe].of[pipe];
        });
    }

    void Write(Pipe pipe, uint32_t offset, uint32_t bytes, const char *what)
    {
        Inside(offset, bytes, what);
        ForBlocks(offset, bytes, [&](BlockUse &use) {
            AfterWrite(pipe, use, what, "overwrites");
            for (int other = 0; other < kPipes; ++other) {
                // A scalar read is over before the next instruction is issued.
                if (other != pipe && other != kScalar && use.read[other] > clocks[pipe].of[other]) {
                    Break("%s on pipe %s overwrites UB that pipe %s may still read: no flag between them", what,
                          PipeName(pipe), PipeName(other));
                }
            }
            use.writer = pipe;
            use.written = clocks[pipe].of[pipe];
        });
        std::memset(&known[offset], 1, bytes);
    }

    // A buffer is handed out anew: what it held is nobody's business any more.
    void Forget(uint32_t offset, uint32_t bytes)
    {
        std::memset(&ub[offset], kPoison, bytes);
        std::memset(&known[offset], 0, bytes);
    }

    void Global(const void *address, uint64_t bytes, const char *what)
    {
        if (host->in_device_memory(host->context, address, bytes) == 0) {
            Break("%s touches %llu bytes of global memory at %p that are in no device allocation", what,
                  static_cast<unsigned long long>(bytes), address);
        }
    }

    // Everything that `to` must wait for when it waits for what `from` was given so far.
    void Wait(Pipe to, const Clock &snapshot)
    {
        clocks[to].Join(snapshot);
    }

    const AmphoraTwinHost *host;
    uint32_t block_index;
    uint32_t block_count;
    std::vector<uint8_t> ub;
    Clock clocks[kPipes];
    // Flags: set, and how far the setting pipe was.
    bool flag_set[static_cast<int>(HardEvent::COUNT)][kEventIds] = {};
    Clock flag_clock[static_cast<int>(HardEvent::COUNT)][kEventIds];
    uint32_t ub_used = 0;
    uint32_t buffers = 0;
    uint32_t pipes_alive = 0;
    bool tensor_left = false;  // a queue went with a tensor allocated, queued or taken

private:
    void Inside(uint32_t offset, uint32_t bytes, const char *what)
    {
        if (bytes == 0 || offset > kUbBytes || bytes > kUbBytes - offset) {
            Break("%s touches UB bytes %u+%u of %u", what, offset, bytes, kUbBytes);
        }
    }

    void AfterWrite(Pipe pipe, const BlockUse &use, const char *what, const char *verb)
    {
        if (use.writer != kPipes && use.writer != pipe && use.written > clocks[pipe].of[use.writer]) {
            Break("%s on pipe %s %s UB that pipe %s may still write: no flag between them", what, PipeName(pipe),
                  verb, PipeName(use.writer));
        }
    }

    template <typename F>
    void ForBlocks(uint32_t offset, uint32_t bytes, F each)
    {
        for (uint32_t b = offset / kUbBlock; b <= (offset + bytes - 1) / kUbBlock; ++b) {
            each(uses[b]);
        }
    }

    std::vector<uint8_t> known;
    std::vector<BlockUse> uses;
};

// The core that this thread plays.
inline Core *&Current()
{
    static thread_local Core *core = nullptr;
    return core;
}

inline Core &ThisCore()
{
    Core *core = Current();
    if (core == nullptr) {
        std::abort();  // A kernel outside of a launch: nothing of the emulation exists.
    }
    return *core;
}

inline uint32_t GetBlockIdx()
{
    return ThisCore().block_index;
}

inline uint32_t GetBlockNum()
{
    return ThisCore().block_count;
}

}  // namespace AscendC
