// Finishes a dense projection and adds the deltas of all adapters of a step, in one launch:
//
//   out[t, :] = round(base[t, :] + bias + Σ_slices scale · (x[t, :]·Aᵀ)·Bᵀ)
//
// with A, B and scale of the slot of row t; rows without an adapter get base + bias, in the same
// order of sums. base is the vendor's product in f32, so base, bias and delta meet in f32 and are
// rounded once. This is the vector form: every product is a multiply and a reduction in UB.
//
//   x      [tokens, k]        compute type, rows at x_pitch
//   base   [tokens, n]        f32, dense
//   bias   [n]                f32
//   out    [tokens, n]        compute type or f32, rows at out_pitch
//   arena                     blocks: A [class, k], B [class, len], both row-major compute type
//   table  [slots, table_rows, 4]  words: A and B in units of 256 bytes, class, scale
//   perm   [tokens]           rows by slot, those without an adapter last
//   tiles  [tiles, 3]         words: slot, first, rows; surplus ones have 0 rows
//
// Work is cut into units: one tile of up to 16 rows (of one slot, or of rows without an adapter) by
// `width` outputs. A core takes units blockIdx, blockIdx + blockNum, ...; no two write the same
// output. Each unit shrinks for itself: recomputing k · class products a chunk costs less here
// than a hand-over between cores, which share no local memory. Slices with the same A shrink once.
#include "kernel_operator.h"
#include "tile.h"
#include "tiling.h"

namespace amphora {

constexpr uint32_t kRows = 16;     // of a tile
constexpr uint32_t kWidth = 512;   // most outputs of a unit
constexpr uint32_t kDepth = 512;   // inputs of one pass over k
constexpr uint32_t kRank = 256;    // largest class
constexpr uint32_t kTiles = 2048;  // most entries of the tile list
constexpr uint32_t kTileWords = 3;
constexpr uint32_t kTableWords = 4;
constexpr uint32_t kArenaUnit = 256;
constexpr uint32_t kBlock = 8;     // floats in 32 bytes

constexpr uint32_t kPass = kDepth > kWidth ? kDepth : kWidth;
constexpr uint32_t kUsed = 2 * 2 * kPass * 4          // queues in and out, two buffers each
                           + kRows * kDepth * 4       // x
                           + 2 * kRows * kWidth * 4   // sums and deltas
                           + kRows * kRank * 4        // intermediate
                           + 3 * kPass * 4            // widened row, products, reduction
                           + kRows * kBlock * 4       // one sum a row
                           + kWidth * 4               // bias
                           + kTiles * kTileWords * 4  // tile list
                           + kRows * 4 + 32;          // perm, table row
static_assert(kUsed <= 184 * 1024, "UB holds 192 KiB, of which the framework keeps some");

template <typename T>
class LoraFused {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR base, GM_ADDR bias, GM_ADDR out, GM_ADDR arena,
                                GM_ADDR table, GM_ADDR perm, GM_ADDR tiles, GM_ADDR tiling)
    {
        AscendC::GlobalTensor<uint32_t> block;
        block.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t *>(tiling));
        uint32_t *to = reinterpret_cast<uint32_t *>(&t_);
        for (uint32_t i = 0; i < sizeof(LoraFusedTiling) / sizeof(uint32_t); ++i) {
            to[i] = block.GetValue(i);
        }
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(x));
        base_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(base));
        bias_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(bias));
        out_.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(out));
        out_f32_.SetGlobalBuffer(reinterpret_cast<__gm__ float *>(out));
        table_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t *>(table));
        perm_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(perm));
        tiles_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t *>(tiles));
        arena_ = arena;

        pipe_.InitBuffer(in_, 2, kPass * sizeof(float));
        pipe_.InitBuffer(result_, 2, kPass * sizeof(float));
        pipe_.InitBuffer(x_buf_, kRows * kDepth * sizeof(float));
        pipe_.InitBuffer(sum_buf_, kRows * kWidth * sizeof(float));
        pipe_.InitBuffer(delta_buf_, kRows * kWidth * sizeof(float));
        pipe_.InitBuffer(mid_buf_, kRows * kRank * sizeof(float));
        pipe_.InitBuffer(wide_buf_, kPass * sizeof(float));
        pipe_.InitBuffer(product_buf_, kPass * sizeof(float));
        pipe_.InitBuffer(reduce_buf_, kPass * sizeof(float));
        pipe_.InitBuffer(total_buf_, kRows * kBlock * sizeof(float));
        pipe_.InitBuffer(bias_buf_, kWidth * sizeof(float));
        pipe_.InitBuffer(tile_buf_, kTiles * kTileWords * sizeof(int32_t));
        pipe_.InitBuffer(perm_buf_, kRows * sizeof(int32_t));
        pipe_.InitBuffer(row_buf_, kBlock * sizeof(uint32_t));
    }

    __aicore__ inline void Process()
    {
        CopyInTiles();
        const uint32_t plain = CeilDiv(t_.tokens - covered_, kRows);
        const uint32_t chunks = CeilDiv(t_.n, t_.width);
        const uint32_t units = (used_tiles_ + plain) * chunks;
        for (uint32_t unit = AscendC::GetBlockIdx(); unit < units; unit += AscendC::GetBlockNum()) {
            Unit(unit / chunks, (unit % chunks) * t_.width);
        }
    }

private:
    // Counts the tiles in use, which lie in front, and the rows they cover, which lie in front of perm.
    __aicore__ inline void CopyInTiles()
    {
        used_tiles_ = 0;
        covered_ = 0;
        if (t_.tiles == 0) {
            return;
        }
        AscendC::LocalTensor<int32_t> list = tile_buf_.Get<int32_t>();
        CopyIn(list, tiles_, t_.tiles * kTileWords);
        Wait<AscendC::HardEvent::MTE2_S>(pipe_);
        while (used_tiles_ < t_.tiles) {
            const uint32_t rows = static_cast<uint32_t>(list.GetValue(used_tiles_ * kTileWords + 2));
            if (rows == 0) {
                break;
            }
            covered_ += rows;
            used_tiles_ += 1;
        }
    }

    __aicore__ inline void Unit(uint32_t tile, uint32_t column)
    {
        const uint32_t width = Min(t_.width, t_.n - column);
        int32_t slot = -1;
        uint32_t first = covered_ + (tile - used_tiles_) * kRows;
        rows_ = Min(kRows, t_.tokens - first);
        if (tile < used_tiles_) {
            AscendC::LocalTensor<int32_t> list = tile_buf_.Get<int32_t>();
            slot = list.GetValue(tile * kTileWords);
            first = static_cast<uint32_t>(list.GetValue(tile * kTileWords + 1));
            rows_ = static_cast<uint32_t>(list.GetValue(tile * kTileWords + 2));
        }
        CopyInRows(first);
        CopyInBase(column, width);
        if (slot >= 0) {
            shrunk_class_ = 0;
            for (uint32_t s = 0; s < t_.slices; ++s) {
                Slice(static_cast<uint32_t>(slot), t_.slice[s], column, width);
            }
        }
        CopyOutRows(column, width);
    }

    // Which row of x each row of the tile is.
    __aicore__ inline void CopyInRows(uint32_t first)
    {
        if (t_.tiles == 0) {
            for (uint32_t i = 0; i < rows_; ++i) {
                row_[i] = first + i;
            }
            return;
        }
        AscendC::LocalTensor<int32_t> rows = perm_buf_.Get<int32_t>();
        CopyIn(rows, perm_[first], rows_);
        Wait<AscendC::HardEvent::MTE2_S>(pipe_);
        for (uint32_t i = 0; i < rows_; ++i) {
            row_[i] = static_cast<uint32_t>(rows.GetValue(i));
        }
        Wait<AscendC::HardEvent::S_MTE2>(pipe_);
    }

    // sums = base + bias.
    __aicore__ inline void CopyInBase(uint32_t column, uint32_t width)
    {
        AscendC::LocalTensor<float> bias = bias_buf_.Get<float>();
        if (t_.has_bias != 0) {
            Load(bias, bias_[column], width);
        }
        AscendC::LocalTensor<float> sums = sum_buf_.Get<float>();
        for (uint32_t i = 0; i < rows_; ++i) {
            const uint64_t at = static_cast<uint64_t>(row_[i]) * t_.n + column;
            Load(sums[i * kWidth], base_[at], width);
            if (t_.has_bias != 0) {
                AscendC::Add(sums[i * kWidth], sums[i * kWidth], bias, static_cast<int32_t>(width));
            }
        }
    }

    // Adds one slice's deltas to those of its outputs that lie in [column, column + width).
    __aicore__ inline void Slice(uint32_t slot, const LoraSliceTiling &slice, uint32_t column, uint32_t width)
    {
        const uint32_t begin = Element(slice, column);
        const uint32_t end = Element(slice, column + width);
        if (begin >= end) {
            return;
        }
        AscendC::LocalTensor<uint32_t> entry = row_buf_.Get<uint32_t>();
        const uint64_t row = static_cast<uint64_t>(slot) * t_.table_rows + slice.row;
        CopyIn(entry, table_[row * kTableWords], kTableWords);
        Wait<AscendC::HardEvent::MTE2_S>(pipe_);
        const uint32_t a = entry.GetValue(0);
        const uint32_t b = entry.GetValue(1);
        const uint32_t rank = entry.GetValue(2);
        const float scale = entry.ReinterpretCast<float>().GetValue(3);
        Wait<AscendC::HardEvent::S_MTE2>(pipe_);
        if (rank == 0) {
            return;
        }
        if (rank != shrunk_class_ || a != shrunk_a_) {
            Shrink(a, rank);
            shrunk_class_ = rank;
            shrunk_a_ = a;
        }
        Expand(b, rank, scale, begin, end - begin, slice.len);
        Merge(slice.out_offset + begin * slice.out_stride - column, slice.out_stride, end - begin);
    }

    // The first element of the slice whose output is not in front of `column`.
    __aicore__ inline uint32_t Element(const LoraSliceTiling &slice, uint32_t column)
    {
        if (column <= slice.out_offset) {
            return 0;
        }
        return Min(slice.len, CeilDiv(column - slice.out_offset, slice.out_stride));
    }

    // mid[i, r] = x[i, :]·A[r, :], f32. The intermediate is the scalar unit's alone.
    __aicore__ inline void Shrink(uint32_t a, uint32_t rank)
    {
        AscendC::GlobalTensor<T> block;
        block.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(arena_ + static_cast<uint64_t>(a) * kArenaUnit));
        AscendC::LocalTensor<float> mid = mid_buf_.Get<float>();
        AscendC::LocalTensor<float> x = x_buf_.Get<float>();
        AscendC::LocalTensor<float> wide = wide_buf_.Get<float>();
        AscendC::LocalTensor<float> product = product_buf_.Get<float>();
        AscendC::LocalTensor<float> reduce = reduce_buf_.Get<float>();
        AscendC::LocalTensor<float> total = total_buf_.Get<float>();
        for (uint32_t depth = 0; depth < t_.k; depth += kDepth) {
            const uint32_t count = Min(kDepth, t_.k - depth);
            for (uint32_t i = 0; i < rows_; ++i) {
                Load(x[i * kDepth], x_[static_cast<uint64_t>(row_[i]) * t_.x_pitch + depth], count);
            }
            for (uint32_t r = 0; r < rank; ++r) {
                Load(wide, block[static_cast<uint64_t>(r) * t_.k + depth], count);
                for (uint32_t i = 0; i < rows_; ++i) {
                    AscendC::Mul(product, x[i * kDepth], wide, static_cast<int32_t>(count));
                    AscendC::ReduceSum<float>(total[i * kBlock], product, reduce, static_cast<int32_t>(count));
                }
                // One wait for all rows: reading a total from the scalar side is what costs.
                Wait<AscendC::HardEvent::V_S>(pipe_);
                for (uint32_t i = 0; i < rows_; ++i) {
                    const float before = depth == 0 ? 0.0f : mid.GetValue(i * kRank + r);
                    mid.SetValue(i * kRank + r, before + total.GetValue(i * kBlock));
                }
                Wait<AscendC::HardEvent::S_V>(pipe_);
            }
        }
    }

    // delta[i, :] = Σ_r (scale · mid[i, r]) · B[r, begin .. begin + count].
    __aicore__ inline void Expand(uint32_t b, uint32_t rank, float scale, uint32_t begin, uint32_t count,
                                  uint32_t len)
    {
        AscendC::GlobalTensor<T> block;
        block.SetGlobalBuffer(reinterpret_cast<__gm__ T *>(arena_ + static_cast<uint64_t>(b) * kArenaUnit));
        AscendC::LocalTensor<float> mid = mid_buf_.Get<float>();
        AscendC::LocalTensor<float> wide = wide_buf_.Get<float>();
        AscendC::LocalTensor<float> delta = delta_buf_.Get<float>();
        for (uint32_t i = 0; i < rows_; ++i) {
            AscendC::Duplicate(delta[i * kWidth], 0.0f, static_cast<int32_t>(count));
        }
        for (uint32_t r = 0; r < rank; ++r) {
            Load(wide, block[static_cast<uint64_t>(r) * len + begin], count);
            for (uint32_t i = 0; i < rows_; ++i) {
                const float factor = scale * mid.GetValue(i * kRank + r);
                AscendC::Axpy(delta[i * kWidth], wide, factor, static_cast<int32_t>(count));
            }
        }
    }

    // sums[i, at + j · stride] += delta[i, j].
    __aicore__ inline void Merge(uint32_t at, uint32_t stride, uint32_t count)
    {
        AscendC::LocalTensor<float> sums = sum_buf_.Get<float>();
        AscendC::LocalTensor<float> delta = delta_buf_.Get<float>();
        if (stride == 1 && at % kBlock == 0) {
            for (uint32_t i = 0; i < rows_; ++i) {
                const AscendC::LocalTensor<float> part = sums[i * kWidth + at];
                AscendC::Add(part, part, delta[i * kWidth], static_cast<int32_t>(count));
            }
            return;
        }
        // Vector operands begin at multiples of 32 bytes and have no element stride: one by one.
        Wait<AscendC::HardEvent::V_S>(pipe_);
        for (uint32_t i = 0; i < rows_; ++i) {
            for (uint32_t j = 0; j < count; ++j) {
                const uint32_t to = i * kWidth + at + j * stride;
                sums.SetValue(to, sums.GetValue(to) + delta.GetValue(i * kWidth + j));
            }
        }
        Wait<AscendC::HardEvent::S_V>(pipe_);
    }

    __aicore__ inline void CopyOutRows(uint32_t column, uint32_t width)
    {
        AscendC::LocalTensor<float> sums = sum_buf_.Get<float>();
        for (uint32_t i = 0; i < rows_; ++i) {
            const uint64_t at = static_cast<uint64_t>(row_[i]) * t_.out_pitch + column;
            if (t_.out_f32 != 0) {
                Store(out_f32_[at], sums[i * kWidth], width);
            } else {
                Store(out_[at], sums[i * kWidth], width);
            }
        }
    }

    // Global memory of any type, widened, into a local f32 buffer.
    template <typename U>
    __aicore__ inline void Load(const AscendC::LocalTensor<float> &to, const AscendC::GlobalTensor<U> &from,
                                uint32_t count)
    {
        AscendC::LocalTensor<U> staged = in_.template AllocTensor<U>();
        CopyIn(staged, from, count);
        in_.EnQue(staged);
        staged = in_.template DeQue<U>();
        Widen(to, staged, count);
        in_.FreeTensor(staged);
    }

    template <typename U>
    __aicore__ inline void Store(const AscendC::GlobalTensor<U> &to, const AscendC::LocalTensor<float> &from,
                                 uint32_t count)
    {
        AscendC::LocalTensor<U> staged = result_.template AllocTensor<U>();
        Narrow(staged, from, count);
        result_.EnQue(staged);
        staged = result_.template DeQue<U>();
        CopyOut(to, staged, count);
        result_.FreeTensor(staged);
    }

    LoraFusedTiling t_;
    uint32_t used_tiles_ = 0;
    uint32_t covered_ = 0;
    uint32_t rows_ = 0;
    uint32_t row_[kRows];
    uint32_t shrunk_class_ = 0;  // 0: the intermediate is another unit's
    uint32_t shrunk_a_ = 0;
    GM_ADDR arena_ = nullptr;

    AscendC::TPipe pipe_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> result_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> x_buf_, sum_buf_, delta_buf_, mid_buf_, wide_buf_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> product_buf_, reduce_buf_, total_buf_, bias_buf_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> tile_buf_, perm_buf_, row_buf_;

    AscendC::GlobalTensor<T> x_, out_;
    AscendC::GlobalTensor<float> base_, bias_, out_f32_;
    AscendC::GlobalTensor<uint32_t> table_;
    AscendC::GlobalTensor<int32_t> perm_, tiles_;
};

}  // namespace amphora

#define AMPHORA_LORA_FUSED(name, type)                                                                     \
    extern "C" __global__ __aicore__ void name(GM_ADDR x, GM_ADDR base, GM_ADDR bias, GM_ADDR out,         \
                                               GM_ADDR arena, GM_ADDR table, GM_ADDR perm, GM_ADDR tiles,  \
                                               GM_ADDR tiling)                                             \
    {                                                                                                      \
        KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);                                                    \
        amphora::LoraFused<type> kernel;                                                                   \
        kernel.Init(x, base, bias, out, arena, table, perm, tiles, tiling);                                \
        kernel.Process();                                                                                  \
    }

AMPHORA_LORA_FUSED(lora_fused_f32, float)
AMPHORA_LORA_FUSED(lora_fused_f16, half)
AMPHORA_LORA_FUSED(lora_fused_bf16, bfloat16_t)
