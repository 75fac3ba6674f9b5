// One whole step of a decoder of the Llama, Qwen and SmolLM families on an x86 CPU with AVX2, FMA and F16C: from embeddings
// to logits, over the paged KV pool. Called through ctypes (`library.py`), used by one thread.
//
// Every number of a token depends on that token's own history alone, in an order that is fixed by
// the shapes: a row of a matrix product is summed group by group, attention goes block by block of
// 64 tokens. How many rows are computed together, in which chunks, on how many threads and in
// which blocks of the pool changes nothing, to the last bit. Products and sums are written as
// intrinsics, and the file is compiled with -ffp-contract=off, so that no tile rounds differently.
//
// Letters: T tokens of the step, H query heads, K kv heads, G = H / K, D head size.

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kBlock = 64;    // tokens of a KV block, as in kv.py
constexpr int kGroup = 32;    // values that share a scale
constexpr int kWide = 16;     // columns of a packed weight's tile
constexpr int kChunk = 128;   // rows of a task
constexpr int kQueries = 16;  // tokens of an attention task

enum Format : int32_t { kF32 = 0, kF16 = 1, kQ8 = 2, kQ4 = 3 };

}  // namespace

extern "C" {

// Packed by `packing.py`: tiles of 16 outputs, see there.
struct Weight {
  int32_t format, rows, columns;  // rows: outputs, columns: inputs
  const void* data;
  const uint16_t* scales;
};

struct Layer {
  const float *attention_norm, *feed_norm;
  const float *qkv_bias, *output_bias, *query_norm, *key_norm;  // null: it has none
  int32_t rotates;
  Weight qkv, output, gate_up, down;
};

struct Config {
  int32_t layers, hidden, feed_forward, heads, kv_heads, head_dim, vocab, kv_blocks, threads;
  float epsilon;
  const Layer* layer;
  const float* norm;
  Weight head;
  const float *cosines, *sines;  // (positions, D / 2)
  float *keys, *values;          // (layers, blocks, K, D, 64) and (layers, blocks, K, 64, D)
};

// One row: `count` tokens of one sequence from position `start` on.
struct Row {
  int32_t begin, start, count, table;  // begin: among the T; table: where its blocks are listed
};

struct Step {
  int32_t tokens, rows, wanted;
  float* x;  // (T, hidden) embeddings; changed
  const Row* row;
  const int32_t* tables;
  const int32_t* index;  // the tokens whose logits are wanted
  float* logits;         // (wanted, vocab)
  int32_t* best;         // (wanted,) lowest id among the largest logits; -1: not finite
};
}

namespace {

// ── numbers ──────────────────────────────────────────────────────────────────────────────────

inline float sum(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

inline float largest(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// e^x within two units in the last place (Cephes' polynomial); exactly 1 at 0, 0 below -87.3.
inline __m256 exponential(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.3f);
  const __m256 is_zero = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
  x = _mm256_min_ps(_mm256_max_ps(x, low), _mm256_set1_ps(88.3f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  x = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  x = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), x);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    p = _mm256_fmadd_ps(p, x, _mm256_set1_ps(c));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(x, x), _mm256_add_ps(x, _mm256_set1_ps(1.0f)));
  const __m256i scale =
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(is_zero, _mm256_mul_ps(p, _mm256_castsi256_ps(scale)));
}

// ── activations ──────────────────────────────────────────────────────────────────────────────

// What a linear layer reads: floats, or 16-bit numbers in groups of 32 with a scale and their sum.
struct Input {
  int columns = 0;
  std::vector<float> floats, scales, sums;
  std::vector<int16_t> shorts;

  void resize(int rows, int width) {
    columns = width;
    const size_t size = static_cast<size_t>(rows) * width;
    if (floats.size() < size) {
      floats.resize(size), shorts.resize(size);
      scales.resize(size / kGroup + 1), sums.resize(size / kGroup + 1);
    }
  }

  // 32 values of one row, the group-th ones.
  void put(Format format, int row, int group, const float* value) {
    const size_t at = static_cast<size_t>(row) * columns + group * kGroup;
    if (format == kF32 || format == kF16) {
      std::memcpy(&floats[at], value, kGroup * sizeof(float));
      return;
    }
    __m256 v[4], most = _mm256_setzero_ps();
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(value + 8 * i);
      most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v[i]));
    }
    const float peak = largest(most);
    const __m256 up = _mm256_set1_ps(peak > 0 ? 32767.0f / peak : 0.0f);
    __m256i n[4];
    for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], up));
    for (int i = 0; i < 4; i += 2) {
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(n[i], n[i + 1]), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&shorts[at + 8 * i]), both);
    }
    __m256i all = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
    all = _mm256_hadd_epi32(all, all), all = _mm256_hadd_epi32(all, all);
    const int total = _mm256_extract_epi32(all, 0) + _mm256_extract_epi32(all, 4);
    // A group that is not finite stays so: its scale poisons what is computed from it.
    scales[at / kGroup] = peak / 32767.0f;
    sums[at / kGroup] = peak / 32767.0f * static_cast<float>(total);
  }

  void put_normalised(Format format, int row, const float* x, const float* weight, float epsilon) {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < columns; i += 8) {
      const __m256 v = _mm256_loadu_ps(x + i);
      squares = _mm256_fmadd_ps(v, v, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(columns) + epsilon);
    alignas(32) float group[kGroup];
    for (int g = 0; g < columns / kGroup; ++g) {
      for (int i = 0; i < kGroup; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + g * kGroup + i);
        const __m256 n = _mm256_mul_ps(v, _mm256_set1_ps(scale));
        _mm256_store_ps(group + i, _mm256_mul_ps(n, _mm256_loadu_ps(weight + g * kGroup + i)));
      }
      put(format, row, g, group);
    }
  }
};

// ── linear layers: R rows by one tile of 16 outputs ──────────────────────────────────────────

inline __m256 halves(const uint16_t* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Unrolled early, so that arrays of registers become registers.
#define EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); ++i)
#define EACH_ROW EACH(r, R)
#define EACH_HALF EACH(half, 2)

template <int R, bool kIsHalf>
void tile_float(const Weight& w, int tile, const Input& in, int row, float* out, int stride) {
  const size_t begin = static_cast<size_t>(tile) * w.columns * kWide;
  const float* wide = static_cast<const float*>(w.data) + begin;
  const uint16_t* half = static_cast<const uint16_t*>(w.data) + begin;
  const float* x = in.floats.data() + static_cast<size_t>(row) * in.columns;
  __m256 acc[R][2];
  EACH_ROW acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int k = 0; k < w.columns; ++k) {
    const __m256 w0 = kIsHalf ? halves(half + k * kWide) : _mm256_loadu_ps(wide + k * kWide);
    const __m256 w1 = kIsHalf ? halves(half + k * kWide + 8) : _mm256_loadu_ps(wide + k * kWide + 8);
    EACH_ROW {
      const __m256 a = _mm256_broadcast_ss(x + static_cast<size_t>(r) * in.columns + k);
      acc[r][0] = _mm256_fmadd_ps(w0, a, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(w1, a, acc[r][1]);
    }
  }
  EACH_ROW {
    _mm256_storeu_ps(out + r * stride, acc[r][0]);
    _mm256_storeu_ps(out + r * stride + 8, acc[r][1]);
  }
}

inline __m256i pair(const int16_t* at) {
  int32_t value;
  std::memcpy(&value, at, sizeof value);
  return _mm256_set1_epi32(value);
}

// Nibbles or bytes times 16-bit activations, summed in 32 bits: at most 16 x 2 x 127 x 32767.
template <int R, bool kIsQ4>
void tile_quantised(const Weight& w, int tile, const Input& in, int row, float* out, int stride) {
  constexpr int kBytes = kIsQ4 ? 256 : 512, kScales = kIsQ4 ? 2 * kWide : kWide;
  const int groups = w.columns / kGroup;
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + static_cast<size_t>(tile) * groups * kBytes;
  const uint16_t* scales = w.scales + static_cast<size_t>(tile) * groups * kScales;
  const int16_t* x = in.shorts.data() + static_cast<size_t>(row) * in.columns;
  const float* d = in.scales.data() + static_cast<size_t>(row) * groups;
  const float* s = in.sums.data() + static_cast<size_t>(row) * groups;
  __m256 acc[R][2];
  EACH_ROW acc[r][0] = acc[r][1] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g, data += kBytes, scales += kScales) {
    __m256i dot[R][2];
    EACH_ROW dot[r][0] = dot[r][1] = _mm256_setzero_si256();
for (int k = 0; k < kGroup; k += 4) {
      __m256i v[4];  // inputs k and k+1 of outputs 0-7 and 8-15, then k+2 and k+3
      if (kIsQ4) {
        const __m256i low = _mm256_set1_epi16(15);
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 8 * k));
        v[0] = _mm256_and_si256(raw, low);
        v[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low);
        v[2] = _mm256_and_si256(_mm256_srli_epi16(raw, 8), low);
        v[3] = _mm256_srli_epi16(raw, 12);
      } else {
        const __m128i* eight = reinterpret_cast<const __m128i*>(data + 16 * k);
        EACH(i, 4) v[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128(eight + i));
      }
      EACH_ROW {
        const int16_t* at = x + static_cast<size_t>(r) * in.columns + g * kGroup + k;
        const __m256i first = pair(at), second = pair(at + 2);
        EACH_HALF {
          dot[r][half] = _mm256_add_epi32(dot[r][half], _mm256_madd_epi16(v[half], first));
          dot[r][half] = _mm256_add_epi32(dot[r][half], _mm256_madd_epi16(v[2 + half], second));
        }
      }
    }
    EACH_HALF {
      const __m256 scale = halves(scales + 8 * half);
      EACH_ROW {
        const __m256 both = _mm256_mul_ps(scale, _mm256_broadcast_ss(d + r * groups + g));
        acc[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[r][half]), both, acc[r][half]);
        if (kIsQ4) {
          const __m256 least = halves(scales + kWide + 8 * half);
          acc[r][half] = _mm256_fmadd_ps(least, _mm256_broadcast_ss(s + r * groups + g), acc[r][half]);
        }
      }
    }
  }
  EACH_ROW {
    _mm256_storeu_ps(out + r * stride, acc[r][0]);
    _mm256_storeu_ps(out + r * stride + 8, acc[r][1]);
  }
}

template <int R>
void tile_of(const Weight& w, int tile, const Input& in, int row, float* out, int stride) {
  switch (w.format) {
    case kF32: return tile_float<R, false>(w, tile, in, row, out, stride);
    case kF16: return tile_float<R, true>(w, tile, in, row, out, stride);
    case kQ8: return tile_quantised<R, false>(w, tile, in, row, out, stride);
    default: return tile_quantised<R, true>(w, tile, in, row, out, stride);
  }
}

// Rows [row, row + count) by tiles [tile, tile + tiles), into out (count, stride).
void multiply(const Weight& w, int tile, int tiles, const Input& in, int row, int count, float* out,
              int stride) {
  for (int t = 0; t < tiles; ++t, out += kWide) {
    for (int r = 0; r < count; r += 6) {
      float* at = out + r * stride;
      switch (std::min(6, count - r)) {
        case 6: tile_of<6>(w, tile + t, in, row + r, at, stride); break;
        case 5: tile_of<5>(w, tile + t, in, row + r, at, stride); break;
        case 4: tile_of<4>(w, tile + t, in, row + r, at, stride); break;
        case 3: tile_of<3>(w, tile + t, in, row + r, at, stride); break;
        case 2: tile_of<2>(w, tile + t, in, row + r, at, stride); break;
        case 1: tile_of<1>(w, tile + t, in, row + r, at, stride); break;
      }
    }
  }
}

// ── attention: some queries of one kv head against the blocks of one sequence ────────────────

struct Query {
  const float* q;
  int position;
  float* out;  // D values, in the end divided by `mass`
  float peak, mass;
};

template <int R>
void attend_block(Query* query, const float* keys, const float* values, int first, int size,
                  float* weights) {
  const int last = query[R - 1].position;  // positions rise
  for (int t = 0; t < kBlock; t += 16) {
    __m256 dot[R][2];
    EACH_ROW dot[r][0] = dot[r][1] = _mm256_setzero_ps();
    for (int d = 0; d < size; ++d) {
      const __m256 k0 = _mm256_loadu_ps(keys + d * kBlock + t);
      const __m256 k1 = _mm256_loadu_ps(keys + d * kBlock + t + 8);
      EACH_ROW {
        const __m256 a = _mm256_broadcast_ss(query[r].q + d);
        dot[r][0] = _mm256_fmadd_ps(k0, a, dot[r][0]);
        dot[r][1] = _mm256_fmadd_ps(k1, a, dot[r][1]);
      }
    }
    EACH_ROW {
      _mm256_store_ps(weights + r * kBlock + t, dot[r][0]);
      _mm256_store_ps(weights + r * kBlock + t + 8, dot[r][1]);
    }
  }
  const __m256 none = _mm256_set1_ps(-INFINITY);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  EACH_ROW {
    float* weight = weights + r * kBlock;
    const __m256i seen = _mm256_set1_epi32(query[r].position - first + 1);
    __m256 most = none;
    for (int t = 0; t < kBlock; t += 8) {
      const __m256i is_seen = _mm256_cmpgt_epi32(seen, _mm256_add_epi32(lanes, _mm256_set1_epi32(t)));
      const __m256 v =
          _mm256_blendv_ps(none, _mm256_load_ps(weight + t), _mm256_castsi256_ps(is_seen));
      _mm256_store_ps(weight + t, v);
      most = _mm256_max_ps(most, v);
    }
    const float peak = std::max(query[r].peak, largest(most));
    const __m256 kept = exponential(_mm256_set1_ps(query[r].peak - peak));
    __m256 mass = _mm256_setzero_ps();
    for (int t = 0; t < kBlock; t += 8) {
      const __m256 p = exponential(_mm256_sub_ps(_mm256_load_ps(weight + t), _mm256_set1_ps(peak)));
      _mm256_store_ps(weight + t, p);
      mass = _mm256_add_ps(mass, p);
    }
    query[r].peak = peak;
    query[r].mass = query[r].mass * _mm256_cvtss_f32(kept) + sum(mass);
    for (int d = 0; d < size; d += 8)
      _mm256_storeu_ps(query[r].out + d, _mm256_mul_ps(_mm256_loadu_ps(query[r].out + d), kept));
  }
  const int visible = std::min(kBlock, last - first + 1);
  for (int d = 0; d < size; d += 16) {
    __m256 acc[R][2];
    EACH_ROW {
      acc[r][0] = _mm256_loadu_ps(query[r].out + d);
      acc[r][1] = _mm256_loadu_ps(query[r].out + d + 8);
    }
    for (int t = 0; t < visible; ++t) {
      const __m256 v0 = _mm256_loadu_ps(values + t * size + d);
      const __m256 v1 = _mm256_loadu_ps(values + t * size + d + 8);
      EACH_ROW {
        const __m256 p = _mm256_broadcast_ss(weights + r * kBlock + t);
        acc[r][0] = _mm256_fmadd_ps(p, v0, acc[r][0]);
        acc[r][1] = _mm256_fmadd_ps(p, v1, acc[r][1]);
      }
    }
    EACH_ROW {
      _mm256_storeu_ps(query[r].out + d, acc[r][0]);
      _mm256_storeu_ps(query[r].out + d + 8, acc[r][1]);
    }
  }
}

// ── the step ─────────────────────────────────────────────────────────────────────────────────

struct alignas(64) Counter {
  std::atomic<int> value{0};
};

class Model {
 public:
  explicit Model(const Config& config)
      : c_(config), layers_(c_.layer, c_.layer + c_.layers), next_(c_.layers * kPhases + 3) {
    for (int i = 1; i < c_.threads; ++i) workers_.emplace_back([this] { work(); });
  }

  ~Model() {
    start_workers(true);
    for (auto& worker : workers_) worker.join();
  }

  void run(Step& step) {
    step_ = &step;
    for (auto& counter : next_) counter.value.store(0, std::memory_order_relaxed);
    const int width = c_.heads * c_.head_dim;
    normalised_.resize(step.tokens, c_.hidden);
    attended_.resize(step.tokens, width);
    gated_.resize(step.tokens, c_.feed_forward);
    last_.resize(step.wanted, c_.hidden);
    queries_.resize(std::max(queries_.size(), static_cast<size_t>(step.tokens) * width));
    places_.resize(step.tokens);
    tasks_.clear();
    for (int r = 0; r < step.rows; ++r) {
      const Row& row = step.row[r];
      for (int i = 0; i < row.count; ++i) {
        const int position = row.start + i;
        places_[row.begin + i] = {position, step.tables[row.table + position / kBlock]};
      }
      for (int at = 0; at < row.count; at += kQueries) tasks_.push_back({r, at});
    }
    // Long contexts first: the last task to end should be a short one.
    std::stable_sort(tasks_.begin(), tasks_.end(), [&](const Task& a, const Task& b) {
      return step.row[a.row].start + a.at > step.row[b.row].start + b.at;
    });
    start_workers(false);
    compute();
  }

  void copy_block(int source, int target) {
    const size_t size = static_cast<size_t>(c_.kv_heads) * kBlock * c_.head_dim;
    for (int layer = 0; layer < c_.layers; ++layer)
      for (float* pool : {c_.keys, c_.values}) {
        float* blocks = pool + static_cast<size_t>(layer) * c_.kv_blocks * size;
        std::memcpy(blocks + target * size, blocks + source * size, size * sizeof(float));
      }
  }

 private:
  static constexpr int kPhases = 7;  // of a layer; after each all threads meet
  struct Task {
    int row, at;
  };
  struct Place {
    int position, block;
  };

  void start_workers(bool is_over) {
    if (workers_.empty()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = is_over;
      ++begun_;
    }
    wake_.notify_all();
  }

  void work() {
    for (int64_t seen = 0;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return begun_ != seen; });
        seen = begun_;
        if (is_over_) return;
      }
      compute();
    }
  }

  // All threads are here before one goes on. One that waits long gives its core away: spinning
  // beside other busy processes would take the core from the thread that is waited for.
  void meet() {
    if (c_.threads == 1) return;
    const int64_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == c_.threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < 2000)
        _mm_pause();
      else
        sched_yield();
    }
  }

  // Tasks 0 … count-1, each by whichever thread is free.
  template <typename Do>
  void share(int phase, int count, Do&& task) {
    for (int i; (i = next_[phase].value.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
    meet();
  }

  // Tiles of outputs by chunks of rows: task(tile, first row, rows).
  template <typename Do>
  void share_tiles(int phase, int tiles, int rows, Do&& task) {
    const int chunks = (rows + kChunk - 1) / kChunk;
    share(phase, tiles * chunks, [&](int i) {
      const int row = i % chunks * kChunk;
      task(i / chunks, row, std::min(kChunk, rows - row));
    });
  }

  // What each thread does, from the embeddings to the logits.
  void compute() {
    Step& step = *step_;
    const int rows = step.tokens, hidden = c_.hidden;
    std::vector<float> room(static_cast<size_t>(kChunk) * std::max(2 * kGroup, c_.head_dim));
    float* scratch = room.data();
    const auto normalise = [&](Input& to, int32_t format, int row, int from, const float* weight) {
      const float* x = step.x + static_cast<size_t>(from) * hidden;
      to.put_normalised(static_cast<Format>(format), row, x, weight, c_.epsilon);
    };
    for (int number = 0; number < c_.layers; ++number) {
      const Layer& layer = layers_[number];
      const int phase = number * kPhases;
      share(phase, rows, [&](int row) {
        normalise(normalised_, layer.qkv.format, row, row, layer.attention_norm);
      });
      share_tiles(phase + 1, c_.heads + 2 * c_.kv_heads, rows, [&](int head, int row, int count) {
        project(number, head, row, count, scratch);
      });
      share(phase + 2, static_cast<int>(tasks_.size()) * c_.kv_heads, [&](int i) {
        attend(number, tasks_[i / c_.kv_heads], i % c_.kv_heads);
      });
      share_tiles(phase + 3, hidden / kWide, rows, [&](int tile, int row, int count) {
        add(layer.output, layer.output_bias, tile, attended_, row, count, scratch);
      });
      share(phase + 4, rows, [&](int row) {
        normalise(normalised_, layer.gate_up.format, row, row, layer.feed_norm);
      });
      share_tiles(phase + 5, c_.feed_forward / kGroup, rows, [&](int group, int row, int count) {
        gate(layer, group, row, count, scratch);
      });
      share_tiles(phase + 6, hidden / kWide, rows, [&](int tile, int row, int count) {
        add(layer.down, nullptr, tile, gated_, row, count, scratch);
      });
    }
    const int phase = c_.layers * kPhases, vocab = c_.vocab;
    share(phase, step.wanted, [&](int row) {
      normalise(last_, c_.head.format, row, step.index[row], c_.norm);
    });
    share_tiles(phase + 1, (vocab + 63) / 64, step.wanted, [&](int group, int row, int count) {
      const int tiles = std::min(4, c_.head.rows / kWide - 4 * group);
      multiply(c_.head, 4 * group, tiles, last_, row, count, scratch, 64);
      const size_t seen = std::min(64, vocab - 64 * group) * sizeof(float);
      for (int r = 0; r < count; ++r)
        std::memcpy(step.logits + static_cast<size_t>(row + r) * vocab + 64 * group,
                    scratch + 64 * r, seen);
    });
    share(phase + 2, step.wanted, [&](int row) {
      step.best[row] = best_of(step.logits + static_cast<size_t>(row) * vocab, vocab);
    });
  }

  float* block_of(float* pool, int layer, int block, int kv_head) const {
    const size_t number = (static_cast<size_t>(layer) * c_.kv_blocks + block) * c_.kv_heads + kv_head;
    return pool + number * kBlock * c_.head_dim;
  }

  // One head of q, k or v for some tokens: multiplied, rotated, and written where it belongs.
  void project(int number, int head, int row, int count, float* scratch) {
    const int size = c_.head_dim, half = size / 2;
    const int tiles = size / kWide;
    const Layer& layer = layers_[number];
    multiply(layer.qkv, head * tiles, tiles, normalised_, row, count, scratch, size);
    for (int r = 0; r < count; ++r) {
      float* value = scratch + r * size;
      const Place place = places_[row + r];
      if (layer.qkv_bias)
        for (int i = 0; i < size; ++i) value[i] += layer.qkv_bias[head * size + i];
      if (layer.query_norm && head < c_.heads + c_.kv_heads)
        normalise_head(value, head < c_.heads ? layer.query_norm : layer.key_norm);
      if (layer.rotates && head < c_.heads + c_.kv_heads) {
        const float* cosine = c_.cosines + static_cast<size_t>(place.position) * half;
        const float* sine = c_.sines + static_cast<size_t>(place.position) * half;
        for (int i = 0; i < half; ++i) {
          const float first = value[i], second = value[i + half];
          value[i] = first * cosine[i] - second * sine[i];
          value[i + half] = second * cosine[i] + first * sine[i];
        }
      }
      const int kv_head = (head - c_.heads) % c_.kv_heads, slot = place.position % kBlock;
      if (head < c_.heads) {
        const float scale = 1.0f / std::sqrt(static_cast<float>(size));
        float* query = &queries_[(static_cast<size_t>(row + r) * c_.heads + head) * size];
        for (int i = 0; i < size; ++i) query[i] = value[i] * scale;
      } else if (head < c_.heads + c_.kv_heads) {
        float* block = block_of(c_.keys, number, place.block, kv_head);
        for (int i = 0; i < size; ++i) block[i * kBlock + slot] = value[i];
      } else {
        float* block = block_of(c_.values, number, place.block, kv_head);
        std::memcpy(block + slot * size, value, size * sizeof(float));
      }
    }
  }

  void normalise_head(float* value, const float* weight) const {
    __m256 squares = _mm256_setzero_ps();
    for (int i = 0; i < c_.head_dim; i += 8) {
      const __m256 v = _mm256_loadu_ps(value + i);
      squares = _mm256_fmadd_ps(v, v, squares);
    }
    const float mean = sum(squares) / static_cast<float>(c_.head_dim);
    const float scale = 1.0f / std::sqrt(mean + c_.epsilon);
    for (int i = 0; i < c_.head_dim; ++i) value[i] = value[i] * scale * weight[i];
  }

  void attend(int number, const Task& task, int kv_head) {
    const Row& row = step_->row[task.row];
    const int size = c_.head_dim, groups = c_.heads / c_.kv_heads;
    const int count = std::min(kQueries, row.count - task.at) * groups;
    std::vector<float> out(static_cast<size_t>(count) * size, 0.0f);
    std::vector<Query> queries(count);
    for (int i = 0; i < count; ++i) {
      const int token = row.begin + task.at + i / groups;
      const int head = kv_head * groups + i % groups;
      queries[i] = {&queries_[(static_cast<size_t>(token) * c_.heads + head) * size],
                    row.start + task.at + i / groups, &out[static_cast<size_t>(i) * size],
                    -INFINITY, 0.0f};
    }
    alignas(32) float weights[4 * kBlock];
    const int last = queries[count - 1].position;
    for (int first = 0; first <= last; first += kBlock) {
      const int block = step_->tables[row.table + first / kBlock];
      const float* keys = block_of(c_.keys, number, block, kv_head);
      const float* values = block_of(c_.values, number, block, kv_head);
      for (int i = 0; i < count;) {
        const int left = count - i;
        Query* query = &queries[i];
        const int taken = std::min(4, left);
        i += taken;
        if (query[taken - 1].position < first) continue;  // they see nothing here
        if (taken == 4) attend_block<4>(query, keys, values, first, size, weights);
        if (taken == 3) attend_block<3>(query, keys, values, first, size, weights);
        if (taken == 2) attend_block<2>(query, keys, values, first, size, weights);
        if (taken == 1) attend_block<1>(query, keys, values, first, size, weights);
      }
    }
    const Format format = static_cast<Format>(layers_[number].output.format);
    for (int i = 0; i < count; ++i) {
      for (int d = 0; d < size; ++d) queries[i].out[d] /= queries[i].mass;
      const int head = kv_head * groups + i % groups;
      for (int d = 0; d < size; d += kGroup)
        attended_.put(format, row.begin + task.at + i / groups, (head * size + d) / kGroup,
                      queries[i].out + d);
    }
  }

  // 32 outputs of the gate and the 32 of the way up beside them: silu(gate) * up.
  void gate(const Layer& layer, int group, int row, int count, float* scratch) {
    constexpr int kBoth = 2 * kGroup;
    multiply(layer.gate_up, group * kBoth / kWide, kBoth / kWide, normalised_, row, count, scratch,
             kBoth);
    const __m256 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
    for (int r = 0; r < count; ++r) {
      float* value = scratch + r * kBoth;
      for (int i = 0; i < kGroup; i += 8) {
        const __m256 v = _mm256_loadu_ps(value + i);
        const __m256 below = _mm256_add_ps(one, exponential(_mm256_sub_ps(zero, v)));
        const __m256 silu = _mm256_div_ps(v, below);
        _mm256_storeu_ps(value + i, _mm256_mul_ps(silu, _mm256_loadu_ps(value + kGroup + i)));
      }
      gated_.put(static_cast<Format>(layer.down.format), row + r, group, value);
    }
  }

  // x += tile of a linear layer.
  void add(const Weight& weight, const float* bias, int tile, const Input& in, int row, int count,
           float* scratch) {
    multiply(weight, tile, 1, in, row, count, scratch, kWide);
    for (int r = 0; r < count; ++r) {
      if (bias)
        for (int i = 0; i < kWide; ++i) scratch[r * kWide + i] += bias[tile * kWide + i];
      float* x = step_->x + static_cast<size_t>(row + r) * c_.hidden + tile * kWide;
      for (int i = 0; i < kWide; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i),
                                              _mm256_loadu_ps(scratch + r * kWide + i)));
    }
  }

  static int best_of(const float* logits, int count) {
    float most = -INFINITY;
    bool is_number = true;
    int at = -1;
    for (int i = 0; i < count; ++i) {
      is_number &= logits[i] == logits[i];
      if (logits[i] > most) most = logits[i], at = i;
    }
    return is_number && std::isfinite(most) ? at : -1;
  }

  const Config c_;
  const std::vector<Layer> layers_;
  Step* step_ = nullptr;
  Input normalised_, attended_, gated_, last_;
  std::vector<float> queries_;
  std::vector<Place> places_;
  std::vector<Task> tasks_;
  std::vector<Counter> next_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  int64_t begun_ = 0;
  bool is_over_ = false;
  std::atomic<int> arrived_{0};
  std::atomic<int64_t> round_{0};
};

}  // namespace

extern "C" {

void* ml_open(const Config* config) { return new Model(*config); }

void ml_close(void* model) { delete static_cast<Model*>(model); }

void ml_step(void* model, Step* step) { static_cast<Model*>(model)->run(*step); }

void ml_copy_block(void* model, int32_t source, int32_t target) {
  static_cast<Model*>(model)->copy_block(source, target);
}

// y (rows, outputs) = x (rows, inputs) times the weight, on this thread alone: for measuring.
void ml_linear(const Weight* weight, const float* x, int32_t rows, float* y) {
  Input in;
  in.resize(rows, weight->columns);
  for (int r = 0; r < rows; ++r)
    for (int g = 0; g < weight->columns / kGroup; ++g)
      in.put(static_cast<Format>(weight->format), r, g,
             x + static_cast<size_t>(r) * weight->columns + g * kGroup);
  multiply(*weight, 0, weight->rows / kWide, in, 0, rows, y, weight->rows);
}
}
