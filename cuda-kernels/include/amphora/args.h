// What crosses from host to device: one struct for each kernel, passed by value as its only parameter.
// src/args.rs mirrors every field; both sides assert the same sizes and offsets.
#pragma once

namespace amphora {

// Element types, as arguments name them.
enum ElementType : int { kF32 = 0, kF16 = 1, kBf16 = 2 };

// Slices of one projection that a kernel takes, and the largest rank class: they fix the layout of
// the shrunk rows in the workspace.
constexpr int kMaxSlices = 4;
constexpr int kMaxRank = 256;

// Logits of a row that one block looks at, and most candidates of a row in all.
constexpr int kLogitChunk = 8192;
constexpr int kMostCandidates = 2048;

// Vectors that a group of lanes of rms_norm_short takes.
constexpr int kShortVectors = 4;

// Most likely tokens of a row, and the words of its log-probabilities: target, its bits, its rank, then
// id and bits of each.
constexpr int kMostBest = 20;
constexpr int kLogprobWords = 3 + 2 * kMostBest;

// Block offsets in the adapter arena count in this many bytes.
constexpr int kArenaUnit = 256;

enum MaskKind : int { kCausal = 0, kWindow = 1, kChunk = 2 };
enum ScoreKind : int { kSoftmaxTopk = 0, kSoftmax = 1, kSigmoid = 2 };
enum ActivationKind : int { kSwiglu = 0, kClampedInterleaved = 1 };

struct WriteTokensArgs {
  const int* prompt;  // [tokens]
  int* table;         // [sequences + ..]
  int sequences;
  int tokens;
};

struct EmbedArgs {
  const int* index;    // [tokens]
  const int* table;    // token ids
  const void* weight;  // [vocab, width]
  void* out;           // [tokens, width]
  long long out_pitch;
  int tokens;
  int width;
};

struct GatherRowsArgs {
  const void* x;    // [.., width]
  const int* rows;  // [count]
  void* out;        // [count, width]
  long long x_pitch;
  long long out_pitch;
  int count;
  int width;
};

struct RmsNormArgs {
  void* x;             // vectors of `width`, `inner` of them in each row of `x_pitch`
  const void* add;     // null: no residual add
  const float* weight; // [width]
  void* out;
  long long x_pitch;
  long long add_pitch;
  long long out_pitch;
  int vectors;
  int inner;
  int width;
  float eps;
};

struct RopeArgs {
  void* q;              // [tokens, heads, dim]
  void* k;              // [tokens, kv_heads, dim]
  const int* position;  // [tokens]
  const float* table;   // [positions, rotary]: cosines, then sines
  const float* q_scale; // [positions] or null
  const void* v;        // [tokens, kv_heads, v_dim]
  const int* kv_index;  // [tokens], -1: not stored; null: nothing is stored
  void* k_cache;        // [places, kv_heads, dim]
  void* v_cache;        // [places, kv_heads, v_dim]
  long long q_pitch;
  long long k_pitch;
  long long v_pitch;
  int tokens;
  int heads;
  int kv_heads;
  int dim;
  int rotary;
  int interleaved;      // 0: element i pairs with i + rotary / 2
  int v_width;          // kv_heads * v_dim
  int row_threads;      // of rope_many: those of a block that have a row
};

struct SwigluArgs {
  const void* x;   // [rows, 2 · inner]
  void* out;       // [rows, inner]
  long long x_pitch;
  long long out_pitch;
  int inner;
  int activation;  // ActivationKind
  float limit;
  float alpha;
};

struct KvWriteArgs {
  const void* k;        // [tokens, k_width]
  const void* v;        // [tokens, v_width]
  const int* kv_index;  // [tokens]; negative: padding
  void* k_cache;        // [positions of all blocks, k_width]
  void* v_cache;        // [positions of all blocks, v_width]
  long long k_pitch;
  long long v_pitch;
  int k_width;
  int v_width;
};

struct CopyBlocksArgs {
  const int* copies;  // [.., 2]: from, to; negative: nothing
  void* k_cache;
  void* v_cache;
  long long k_bytes;  // of one block
  long long v_bytes;
};

struct AttentionArgs {
  const void* q;           // [tokens, heads, k_dim]
  const void* k_cache;     // [blocks, block_size, kv_heads, k_dim]
  const void* v_cache;     // [blocks, block_size, kv_heads, v_dim]
  const int* q_start;      // [sequences + 1]
  const int* context;      // [sequences]
  const int* block_table;  // [sequences, table_width]
  const float* sinks;      // [heads] or null
  void* out;               // [tokens, heads, v_dim]
  long long q_pitch;
  long long out_pitch;
  int sequences;
  int table_width;
  int block_size;
  int heads;
  int kv_heads;
  int k_dim;
  int v_dim;
  int mask;                // MaskKind
  int mask_width;
  float scale;
};

struct SliceArgs {
  int table;   // first row of the slice within a slot
  int offset;  // output of its first element
  int stride;  // outputs from one element to the next
  int len;
};

// The adapters of one projection.
struct LoraArgs {
  const void* arena;  // blocks
  const void* rows;   // LoraRow [slots, table_rows]
  float* shrunk;      // [positions, kMaxSlices, kMaxRank], scale · x·Aᵀ
  int table_rows;
  int slice_count;
  SliceArgs slices[kMaxSlices];
};

struct LoraShrinkArgs {
  const void* x;
  const int* tiles;           // [.., tile_words], ending in slot, first, rows
  const int* perm;            // null: rows of x are positions
  const float* pair_weights;  // multiplies the input of each pair; null: 1
  LoraArgs lora;
  long long x_pitch;
  int k;
  int tile_words;             // 3 dense, 4 with the expert in front
  int pairs_per_row;          // rows of x are perm[position] / pairs_per_row
  int parts;                  // blocks that share k
  float* partials;            // [parts, part_pitch]: like shrunk, of each part; null: parts add to shrunk
  long long part_pitch;
};

struct LinearArgs {
  const void* x;       // [tokens, k]
  const void* weight;  // [n, k]
  const float* bias;   // [n] or null
  void* out;           // [tokens, n]
  long long x_pitch;
  long long out_pitch;
  int tokens;
  int n;
  int k;
  int weight_type;     // ElementType
  int out_f32;         // 0: out is of the compute type
  int aligned;         // kAligned… of dense.cuh
};

// A dense product on tensor cores, with the deltas of its rows if there are slices.
struct DenseArgs {
  LinearArgs base;
  LoraArgs lora;     // its shrunk rows are of the compute type: [tokens, kMaxSlices, kMaxRank]
  const int* slot;   // [tokens]; negative: no adapter
  const int* perm;   // [tokens]: the rows by slot; null: rows in order
  const float* sums; // [tokens, n]: the base product, made elsewhere; null: made here
  unsigned* ready;   // two counters of the streaming kernel, 0 between kernels; of a cluster that makes its shrunk
                     // rows, their state; null: made in front
  int parts;         // blocks that share k
  int group;         // column tiles that are neighbours in the order of blocks; 1: one after another
  int factor_bytes;  // room for rows of B in shared memory, of the streaming kernels
};

// What cuTensorMapEncodeTiled writes. Its address is a multiple of 64.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

// A dense product of clusters, whose operands tensor maps bring; and the shrink of one, without maps.
struct DenseClusterArgs {
  TensorMap weight;  // boxes of 64 k and as many rows as a tile has outputs
  TensorMap x;       // boxes of 64 k × x_rows rows
  DenseArgs of;
  int x_rows;        // where parts share k, the rows of x, rounded up to 8
  int stages;        // of the ring, where it is not the kernel's own
  int streams;       // 1: x comes through the ring too
};

struct DenseShrinkArgs {
  const void* x;     // [tokens, k]
  const int* tiles;  // [.., 3]
  const int* perm;   // [tokens]
  LoraArgs lora;
  long long x_pitch;
  int k;
  int aligned;       // kAlignedOperands
  int rank_rows;     // rows of A that a block takes: 8 or 32
  int early;         // 1: the next kernel may begin before x is complete
  int tile_count;    // of dense_shrink_many
  int block_tiles;   // of dense_shrink_many: neighbouring tiles of a block
};

struct LoraLinearArgs {
  LinearArgs base;
  LoraArgs lora;
  const int* perm;   // [tokens]
  const int* tiles;  // [tile_count, 3]
  int tile_count;
  int reserved;
};

struct MoeGateUpArgs {
  const void* x;              // [tokens, hidden]
  const void* weight;         // [experts, 2 · inner, hidden]
  const float* bias;          // [experts, 2 · inner] or null
  void* act;                  // [pairs, inner] by position
  const int* perm;            // [pairs]
  const int* tiles;           // [.., 4]
  const float* pair_weights;  // multiplies the input; null: 1
  const int* lora_tiles;      // [lora_tile_count, 4]
  LoraArgs lora;
  long long x_pitch;
  int lora_tile_count;
  int hidden;
  int inner;
  int top_k;
  int weight_type;            // ElementType
  int activation;             // ActivationKind
  float limit;
  float alpha;
};

struct MoeDownArgs {
  const void* act;        // [pairs, inner] by position
  const void* weight;     // [experts, hidden, inner]
  const float* bias;      // [experts, hidden] or null
  float* y;               // [pairs, hidden] by pair
  const int* perm;        // [pairs]
  const int* tiles;       // [.., 4]
  const int* lora_tiles;  // [lora_tile_count, 4]
  LoraArgs lora;
  int lora_tile_count;
  int hidden;
  int inner;
  int weight_type;        // ElementType
};

// One of both products, for few tokens.
struct MoeStreamArgs {
  const void* x;              // gate_up: [tokens, hidden]; down: [pairs, inner] by position
  const void* weight;         // [experts, n, k], of the compute type
  const float* bias;          // [experts, n] or null
  void* out;                  // gate_up: [pairs, inner] by position; down: f32 [pairs, n] by pair
  const int* perm;            // [pairs]
  const int* tiles;           // [tile_count, 4]
  const int* lora_tiles;      // [lora_tile_count, 4]
  float* clear;               // the other product's shrunk rows, which this one sets to 0
  unsigned* state;            // [4], 0 before the first call; see `StreamState`
  LoraArgs lora;              // shrunk: [pairs, slices, kMaxRank], 0 before
  long long x_pitch;
  int tile_count;
  int lora_tile_count;
  int n;
  int top_k;
  int pairs;
  int activation;             // ActivationKind
  float limit;
  float alpha;
};

struct MoeCombineArgs {
  const float* y;        // [tokens, top_k, hidden]
  const int* experts;    // [tokens, top_k]; -1: padding
  const float* weights;  // [tokens, top_k]; null: 1
  void* out;             // [tokens, hidden]
  long long out_pitch;
  int hidden;
  int top_k;
  int add;               // 1: on top of what out holds
  int reserved;
};

// One of the two expert products of a prefill step. `inner` outputs of gate_up are pairs of a gate and
// an up.
struct MoePrefillArgs {
  TensorMap map;          // boxes of 64 k × 64 rows of the weight (not for mma.sync)
  TensorMap tokens;       // boxes of 64 k × 16 rows of x by position (not for mma.sync)
  // With adapters, and not for mma.sync: boxes of one step × 32 rows of `shrunk`; and of one step of blocks B of
  // the rank classes of more than one, × the rows of two units.
  TensorMap shrunk_map;
  TensorMap factors[6];
  const void* weight;     // [experts, 2 · inner, hidden], or [experts, hidden, inner]
  const void* x;          // gate_up: [tokens, hidden]; down: [pairs, inner] by position
  const float* bias;      // a number for each row of the weight; null: none
  void* out;              // gate_up: [pairs, inner] by position; down: f32 [pairs, hidden] by pair
  const int* perm;        // [pairs]
  const int* tiles;       // [tile_count, 4]
  const int* lora_tiles;  // [lora_tile_count, 4]
  const void* arena;
  const void* rows;       // LoraRow [slots, table_rows]
  const void* shrunk;     // [pairs, 2, kMaxRank / 32, 64]: 32 of the rank in two parts
  long long x_pitch;
  int tile_count;
  int lora_tile_count;    // 0: no adapters
  int table_rows;
  int tables[2];          // first table row of gate and up, or of down; -1: none
  int hidden;
  int inner;
  int experts;
  int top_k;
  int activation;         // ActivationKind
  float limit;
  float alpha;
  unsigned* ready;        // [experts + 3], zero between operators: see moe_prefill_ready.cuh
};

// Both products of a prefill step in one launch.
struct MoePrefillBothArgs {
  MoePrefillArgs gate_up;
  MoePrefillArgs down;
};

// The rows of x by position.
struct MoePrefillGatherArgs {
  const void* x;    // [tokens, hidden]
  const int* perm;  // [pairs]
  void* out;        // [pairs, hidden], rows side by side
  long long x_pitch;
  int pairs;
  int hidden;
  int top_k;
  int reserved;
};

// What a shrink of a prefill step needs of the kernel in front: all; nothing; or x alone, as that began behind
// all else.
enum ShrinkNeeds : int { kNeedsAll = 0, kNeedsNothing = 1, kNeedsX = 2 };

// The shrink of a prefill step.
struct MoePrefillShrinkArgs {
  const void* x;          // as for the product behind it
  const int* perm;        // null: rows of x are positions
  const int* lora_tiles;  // [lora_tile_count, 4]
  const void* arena;
  const void* rows;       // LoraRow [slots, table_rows]
  void* shrunk;           // [pairs, 2, kMaxRank / 32, 64]
  long long x_pitch;
  int lora_tile_count;
  int table_rows;
  int tables[2];
  int k;
  int top_k;
  int needs;              // ShrinkNeeds
  int reserved;
};

// The gather of a prefill step and the shrink of gate_up.
struct MoePrefillGatherShrinkArgs {
  MoePrefillGatherArgs gather;
  MoePrefillShrinkArgs shrink;
};

struct RouteTopkArgs {
  const float* logits;      // [tokens, experts]
  const int* live;          // [tokens]; negative: padding
  const int* slot;          // [tokens]
  const float* correction;  // [experts] or null
  int* chosen;              // [tokens, top_k]
  float* weights;           // [tokens, top_k]
  int* keys;                // [tokens, top_k]: the sort key of each pair
  int experts;
  int top_k;
  int slots;
  int score;                // ScoreKind
  int groups;               // 0: choice among all
  int keep;
  int best;
  int renorm;
  float scale;
  int reserved;
};

struct RouteSortArgs {
  RouteTopkArgs choose;  // its keys: [tokens, top_k] if chosen apart
  int* perm;             // [tokens · top_k]
  int* tiles;            // [tile_count, 4]
  int* lora_tiles;       // [lora_tile_count, 4]
  int tokens;
  int tile_rows;
  int tile_count;
  int lora_tile_count;
  int chosen;            // 1: keys have been made by a kernel in front
  int reserved;
};

struct RouteRankArgs {
  const int* keys;  // [pairs]
  int* sorted;      // [pairs]: the keys in order
  int* perm;        // [pairs]
  int pairs;
  int reserved;
};

struct RouteTilesArgs {
  const int* sorted;  // [pairs]
  int* tiles;         // [tile_count, 4]
  int* lora_tiles;    // [lora_tile_count, 4]
  int pairs;
  int slots;
  int tile_rows;
  int tile_count;
  int lora_tile_count;
  int reserved;
};

// What `sample_survey` finds in a chunk of a row.
struct SamplePartial {
  unsigned long long first;  // key of its first token
  unsigned long long bound;  // key up to which no candidate is missing
  double mass;               // of the tempered softmax, relative to its first token's
  double raw_mass;           // of the raw softmax, where it is wanted
  float raw_peak;
  int reserved;
};

struct SampleArgs {
  const float* logits;       // [.., vocab]
  const void* sampling;      // SampleRow [sequences]
  const int* sample_slot;    // [sequences]; negative: padding
  const int* edit_start;     // [sequences + 1]
  const void* edits;         // LogitEdit
  int* table;
  int* result;               // [sequences, 2]
  SamplePartial* partials;   // [sequences, chunks]
  unsigned long long* keys;  // [sequences, chunks, candidates]
  unsigned* edited;          // [sequences, chunks * kLogitChunk / 32]: a bit for each token
  int vocab;
  int chunks;
  int candidates;            // of a chunk
  int reserved;
};

// What `logprobs_survey` finds in a chunk of a row.
struct LogprobPartial {
  unsigned long long first;  // key of its first token
  double mass;               // of the softmax, relative to its first token's
  int before;                // tokens that come before the target
  int reserved;
};

struct LogprobsArgs {
  const float* logits;       // [.., vocab]
  const int* target;         // [rows]; -1: the token just drawn for the row
  const int* best;           // [rows]: tokens wanted; negative: the row does not ask
  const int* sample_slot;    // of rows that draw
  const int* table;
  int* out;                  // [rows, kLogprobWords]
  LogprobPartial* partials;  // [rows, chunks]
  unsigned long long* keys;  // [rows, chunks, kMostBest]
  int vocab;
  int chunks;
};

}  // namespace amphora

#include "amphora/args_layout.h"
