// The kernels of cpu_kernels.py: a decode step in bfloat16 on CPUs with AVX-512, which use AMX or AVX512_BF16 where
// there is one.
//
// A decode step reads every weight once for a few rows, so it cannot be faster than the memory. These kernels
// read weights row by row, as a checkpoint stores them. Each thread fetches ahead what it reads next, beyond the
// end of a product the keys and values or the next weights (Stream), so that nothing begins by waiting for the
// memory. Sums are in float32 and rounded to bfloat16 once. Each output is computed by one thread, in the same
// order for any number of rows and threads. MOST_CHANNELS, the largest size of a head, is set by cpu_kernels.py.
// Functions that take a Stream are called by all threads of a parallel region.

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

enum {
    TILE = 16,         // rows of a tile, and float32 columns
    STEP = 32,         // bfloat16 columns of a tile
    BLOCK = 32,        // outputs, and input rows, that are computed at once
    LINE = 64,         // bytes of a cache line
    AHEAD = 64 << 10,  // bytes that a thread fetches ahead, a part of its L2 cache
    SERIAL = 8192,     // elements up to which a second thread does not pay
    FEW = 4,           // rows of a product that each thread prepares for itself
    GROUP = 1024       // tokens that are summed before the token is searched for; a multiple of 16
};

// weight[outputs, inputs], bias[outputs] or NULL. inputs: a multiple of 32. outputs: at least 32.
typedef struct {
    const bf16 *weight, *bias;
    long outputs, inputs;
} Product;

enum { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

// The weights and sizes of a decoder layer with grouped heads and one gated MLP. query_norm and key_norm: NULL
// for none.
typedef struct {
    Product products[PRODUCTS];
    const bf16 *input_norm, *query_norm, *key_norm, *post_norm;
    long heads, kv_heads, size, rotary;
    float eps, scale;
} Layer;

// Attention of a few queries of each row over the row's keys, with grouped heads.
//
// query[rows * width, ...] with `stride` elements for each token; its heads come first. keys, values: the
// first key and value head of each row are `cached` elements apart, heads `spaced` elements. mask: added to the
// scaled scores of a token; rows are `covered` elements apart, tokens `apart`. If it is NULL, a token sees the
// keys up to positions[rows * width]. contexts[rows]: the number of keys to read, at most length. y[rows * width,
// kv_heads * group * size]. size: a multiple of 32, at most MOST_CHANNELS.
typedef struct {
    const bf16* query;
    bf16 *keys, *values;
    const float* mask;
    const int64_t *contexts, *positions;
    bf16* y;
    long rows, width, kv_heads, group, size, length, stride, cached, spaced, covered, apart;
    float scale;
} Attention;

// What threads read in turn: a product's weights, or, if product is NULL, the keys and values of an attention,
// which begin `shift` elements behind its own.
typedef struct {
    const Product* product;
    const Attention* attention;
    long shift;
} Source;

// A thread, memory of its own, the heads of keys whose attention it computes, and what it fetches: its share of the
// `left` sources that follow.
typedef struct {
    long thread, threads;
    void* own;
    long first, last;  // heads, counted over all rows; the last is not its own
    const Source* sources;
    long left, part;       // part: of a source's keys and values, the one to fetch next
    const char *at, *end;  // of what it fetches
} Stream;

static __m512 widen(const bf16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((void*)from)), 16));
}

// Round to the nearest, ties to even.
static void narrow(__m512 values, bf16* to) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((void*)to, (__m256i)_mm512_cvtneps_pbh(values));
#else
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((void*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

// Add bias and residual, if any, to a tile of sums [outputs, rows], and write it as y[row, output].
static void write(const float* sums, const bf16* bias, const bf16* residual, bf16* y, long rows, long outputs) {
    __m512i column = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(TILE));
    for (long row = 0; row < rows; row++) {
        __m512 values = _mm512_i32gather_ps(column, sums + row, 4);
        if (bias) values = _mm512_add_ps(values, widen(bias));
        if (residual) values = _mm512_add_ps(values, widen(residual + row * outputs));
        narrow(values, y + row * outputs);
    }
}

// The first block of outputs that a thread computes.
static long first_block(const Product* product, long thread, long threads) {
    return (product->outputs + BLOCK - 1) / BLOCK * thread / threads;
}

// The first of the heads of keys, counted over all rows, whose attention a thread computes: an equal share of
// the keys.
static long first_head(const Attention* attention, long thread, long threads) {
    long keys = 0, head = 0;
    for (long row = 0; row < attention->rows; row++) keys += attention->contexts[row];
    long before = keys * attention->kv_heads * thread / threads;
    for (long row = 0; row < attention->rows; row++)
        for (long i = 0; i < attention->kv_heads; i++, head++)
            if ((before -= attention->contexts[row]) < 0) return head;
    return head;
}

// Go on to the next part of a source, or to the next source; returns 0 if there is none.
static int go_on(Stream* stream) {
    if (!stream->left) return 0;
    const Source* source = stream->sources;
    const Attention* a = source->attention;
    if (source->product) {
        const Product* product = source->product;
        const bf16* ends[2];
        for (long i = 0; i < 2; i++) {
            long output = BLOCK * first_block(product, stream->thread + i, stream->threads);
            if (output > product->outputs) output = product->outputs;
            ends[i] = product->weight + output * product->inputs;
        }
        stream->at = (const char*)ends[0];
        stream->end = (const char*)ends[1];
    } else if (stream->first + stream->part / 2 < stream->last) {
        long which = stream->first + stream->part / 2, row = which / a->kv_heads, head = which % a->kv_heads;
        const bf16* from = stream->part % 2 ? a->values : a->keys;
        from += source->shift + row * a->cached + head * a->spaced;
        stream->at = (const char*)from;
        stream->end = (const char*)(from + a->contexts[row] * a->size);
        stream->part++;
        return 1;
    }
    stream->part = 0;
    stream->sources++;
    stream->left--;
    return 1;
}

// Return where the next bytes to fetch begin, or NULL if there are none.
static const char* take(Stream* stream, long bytes) {
    while (stream->at >= stream->end)
        if (!go_on(stream)) return NULL;
    stream->at += bytes;
    return stream->at - bytes;
}

// Fetch the next lines.
static void fetch(Stream* stream) {
    const char* from = take(stream, BLOCK * LINE);
    for (long i = 0; from && i < BLOCK; i++) _mm_prefetch(from + i * LINE, _MM_HINT_T1);
}

// attention: of which the thread computes a share, or NULL.
static Stream start(const Source* sources, long count, const Attention* attention, char* own, size_t bytes) {
    long thread = omp_get_thread_num();
    Stream stream = {.thread = thread, .threads = omp_get_num_threads(), .sources = sources, .left = count};
    stream.own = own + thread * bytes;
    if (attention) {
        stream.first = first_head(attention, thread, stream.threads);
        stream.last = first_head(attention, thread + 1, stream.threads);
    }
    for (long i = 0; i < AHEAD / (BLOCK * LINE); i++) fetch(&stream);
    return stream;
}

// Memory that is kept for the calling thread's next call, because the system would clear new memory each time.
// Not for the other threads of a region: the engine ends them whenever it has nothing to do.
typedef struct {
    void* memory;
    size_t capacity;
} Kept;

static void* keep(Kept* kept, size_t bytes) {
    if (bytes > kept->capacity) {
        free(kept->memory);
        kept->memory = malloc(kept->capacity = bytes);
    }
    return kept->memory;
}

// As many bytes for each thread of the next region.
static char* keep_for_threads(size_t bytes) {
    static _Thread_local Kept kept;
    return keep(&kept, bytes * omp_get_max_threads());
}

// What follows exists twice, with AMX and without. `multiply_block` and `multiply_tile` do the work.
#ifdef __AMX_BF16__

// AMX takes pairs of columns as one number, and these with the rows beside each other.
enum { PAIRED = 1 };

static long pair_at(long row, long pair, long rows, long pairs) { return pair * rows + row; }

// Tiles 0 to 3 hold the sums of two tiles of outputs by two of input rows; 4 and 5 hold weights; 6 and 7
// input rows.
static void configure(long first, long second) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = TILE;
        config.bytes[tile] = tile == 4 || tile == 5 ? 4 * TILE : 4 * (tile % 2 ? second : first);
    }
    _tile_loadconfig(&config);
}

static void release(void) { _tile_release(); }

// Multiply weight[BLOCK, inputs] by `left` rows, from `row` on, of the `rows` in `beside`; at most BLOCK. sums[0]: of
// the first tile of outputs by the first tile of rows, sums[1] by the second, if there is one; then the same of the
// second tile of outputs. stream: from which to fetch as many bytes as the weights have, or NULL.
static void multiply_block(const bf16* weight, long inputs, const void* beside, long rows, long row, long left,
                           float (*sums)[TILE * TILE], Stream* stream) {
    const bf16 *upper = weight, *lower = weight + TILE * inputs;
    int second = left > TILE;
    _tile_zero(0);
    _tile_zero(2);
    if (second) {
        _tile_zero(1);
        _tile_zero(3);
    }
    for (long input = 0; input < inputs; input += STEP) {
        const uint32_t* packed = (const uint32_t*)beside + input / 2 * rows + row;
        _tile_loadd(4, upper + input, 2 * inputs);
        _tile_loadd(5, lower + input, 2 * inputs);
        _tile_loadd(6, packed, 4 * rows);
        if (stream) fetch(stream);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (second) {
            _tile_loadd(7, packed + TILE, 4 * rows);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    _tile_stored(0, sums[0], 4 * TILE);
    _tile_stored(2, sums[2], 4 * TILE);
    if (second) {
        _tile_stored(1, sums[1], 4 * TILE);
        _tile_stored(3, sums[3], 4 * TILE);
    }
}

// sums[TILE, rows of TILE] = weight[TILE, inputs] beside^T.
static void multiply_tile(const bf16* weight, long inputs, const uint32_t* beside, long rows, float* sums) {
    _tile_zero(0);
    for (long input = 0; input < inputs; input += STEP) {
        _tile_loadd(4, weight + input, 2 * inputs);
        _tile_loadd(6, beside + input / 2 * rows, 4 * rows);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, sums, 4 * TILE);
}

#else

// Without AMX, rows stay as they are, and sums are formed of FOUR outputs by FOUR rows at a time, in registers.
enum { PAIRED = 0, FOUR = 4 };

static long pair_at(long row, long pair, long rows, long pairs) { return row * pairs + pair; }

static void configure(long first, long second) {}

static void release(void) {}

// 32 numbers of a row, as their products take them: in pairs, or else the even and the odd ones in float32.
#ifdef __AVX512BF16__
typedef __m512bh Numbers;

static inline Numbers load(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }

static inline __m512 add_products(__m512 total, Numbers a, Numbers b) { return _mm512_dpbf16_ps(total, a, b); }
#else
typedef struct {
    __m512 even, odd;
} Numbers;

static inline Numbers load(const bf16* from) {
    __m512i pairs = _mm512_loadu_si512(from);
    __m512i odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000));
    return (Numbers){_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), _mm512_castsi512_ps(odd)};
}

static inline __m512 add_products(__m512 total, Numbers a, Numbers b) {
    return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, total));
}
#endif

// sums[FOUR, FOUR of TILE] = the sums of the elements of each of totals.
static inline void add_up(__m512 totals[FOUR][FOUR], float* sums) {
    __m512 lanes[FOUR];
    for (int i = 0; i < FOUR; i++) {
        // Each lane of 128 bits gets its part of the four sums.
        __m512 *of = totals[i], first, second;
        first = _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
        second = _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
        __m512d one = _mm512_castps_pd(first), two = _mm512_castps_pd(second);
        lanes[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(one, two)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(one, two)));
    }
    for (int i = 0; i < FOUR; i += 2)
        lanes[i / 2] = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[i], lanes[i + 1], 0x88),
                                     _mm512_shuffle_f32x4(lanes[i], lanes[i + 1], 0xdd));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x88),
                               _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xdd));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(all));
    _mm_storeu_ps(sums + TILE, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(sums + 2 * TILE, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(sums + 3 * TILE, _mm512_extractf32x4_ps(all, 3));
}

// sums[FOUR, rows of TILE] = weight[FOUR, inputs] x[rows, inputs]^T; rows: a constant, at most FOUR. Each step fetches
// FOUR lines from `ahead` on, which then grows by `apart` bytes. (Counts that are not constants cost registers.)
static inline __attribute__((always_inline)) void multiply_few(const bf16* weight, long inputs, const bf16* x,
                                                               const long rows, float* sums, const char* ahead,
                                                               long apart) {
    __m512 totals[FOUR][FOUR];
    Numbers weights[FOUR];
    for (int i = 0; i < FOUR; i++)
        for (int row = 0; row < FOUR; row++) totals[i][row] = _mm512_setzero_ps();
    for (long input = 0; input < inputs; input += STEP, ahead += apart) {
        for (int i = 0; i < FOUR; i++) _mm_prefetch(ahead + i * LINE, _MM_HINT_T1);
        for (int i = 0; i < FOUR; i++) weights[i] = load(weight + i * inputs + input);
        for (int row = 0; row < rows; row++) {
            Numbers numbers = load(x + row * inputs + input);
            for (int i = 0; i < FOUR; i++) totals[i][row] = add_products(totals[i][row], weights[i], numbers);
        }
    }
    add_up(totals, sums);
}

// The same for the first FOUR of `left` rows. lines: to fetch from the stream at each step.
static void multiply_four(const bf16* weight, long inputs, const bf16* x, long left, float* sums, Stream* stream,
                          long lines) {
    long apart = LINE * lines;
    const char* ahead = lines ? take(stream, apart * (inputs / STEP)) : NULL;
    if (!ahead) ahead = (const char*)weight, apart = 0;
    if (left == 1) multiply_few(weight, inputs, x, 1, sums, ahead, apart);
    else if (left == 2) multiply_few(weight, inputs, x, 2, sums, ahead, apart);
    else if (left == 3) multiply_few(weight, inputs, x, 3, sums, ahead, apart);
    else multiply_few(weight, inputs, x, FOUR, sums, ahead, apart);
}

static void multiply_block(const bf16* weight, long inputs, const void* beside, long rows, long row, long left,
                           float (*sums)[TILE * TILE], Stream* stream) {
    const bf16* x = (const bf16*)beside + row * inputs;
    long groups = (left + FOUR - 1) / FOUR;
    for (long output = 0; output < BLOCK; output += FOUR, weight += FOUR * inputs)
        for (long group = 0; group < groups; group++) {
            // As much as is read is fetched, in equal parts with each group: else the memory would idle meanwhile.
            long at = group * FOUR, lines = stream ? FOUR / groups + (group < FOUR % groups) : 0;
            float* to = sums[output / TILE * 2 + at / TILE] + output % TILE * TILE + at % TILE;
            multiply_four(weight, inputs, x + at * inputs, left - at, to, stream, lines);
        }
}

static void multiply_tile(const bf16* weight, long inputs, const uint32_t* beside, long rows, float* sums) {
    const bf16* x = (const bf16*)beside;
    for (long output = 0; output < TILE; output += FOUR, weight += FOUR * inputs)
        for (long row = 0; row < rows; row += FOUR)
            multiply_four(weight, inputs, x + row * inputs, rows - row, sums + output * TILE + row, NULL, 0);
}

#endif

// Arrange x[rows, inputs] for `multiply`; see pair_at. A single row is in this order already. own: space for the
// result of this thread alone, or NULL if the threads share the work; then the result is in `shared`.
static const void* arrange(const bf16* x, void* own, void* shared, long rows, long inputs, const Stream* stream) {
    if (rows == 1 || !PAIRED) return x;
    long pairs = inputs / 2, first = 0, end = pairs;
    if (!own) {
        first = pairs * stream->thread / stream->threads;
        end = pairs * (stream->thread + 1) / stream->threads;
    }
    uint32_t* to = own ? own : shared;
    for (long row = 0; row < rows; row++)
        for (long pair = first; pair < end; pair++)
            memcpy(to + pair_at(row, pair, rows, pairs), x + row * inputs + 2 * pair, 4);
    if (!own) {
#pragma omp barrier
    }
    return to;
}

// y[rows, outputs] = x[rows, inputs] weight^T + bias + residual[rows, outputs], the last unless NULL. beside: x
// as `arrange` returned it.
static void multiply(const Product* product, const void* beside, const bf16* residual, bf16* y, long rows,
                     Stream* stream) {
    long outputs = product->outputs, inputs = product->inputs, before = -1;
    long end = first_block(product, stream->thread + 1, stream->threads);
    float sums[4][TILE * TILE] __attribute__((aligned(64)));

    for (long block = first_block(product, stream->thread, stream->threads); block < end; block++) {
        // The last block overlaps the one before it where outputs is no multiple; both write the same.
        long output = block * BLOCK > outputs - BLOCK ? outputs - BLOCK : block * BLOCK;
        const bf16* weight = product->weight + output * inputs;
        const bf16* bias = product->bias ? product->bias + output : NULL;

        for (long row = 0; row < rows; row += BLOCK) {
            long left = rows - row < BLOCK ? rows - row : BLOCK;
            long first = left < TILE ? left : TILE, second = left - first;
            if (left != before) configure(first, second ? second : TILE);
            before = left;

            multiply_block(weight, inputs, beside, rows, row, left, sums, row ? NULL : stream);
            for (int tile = 0; tile < 4; tile++) {
                if (tile % 2 && !second) continue;
                long column = tile / 2 * TILE, from = (row + tile % 2 * TILE) * outputs + output + column;
                write(sums[tile], bias ? bias + column : NULL, residual ? residual + from : NULL, y + from,
                      tile % 2 ? second : first, outputs);
            }
        }
    }
}

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias[outputs], the last unless NULL. work:
// space for rows * inputs elements.
void linear(const bf16* weight, const bf16* bias, const bf16* x, bf16* y, void* work, long rows, long outputs,
            long inputs) {
    Product product = {weight, bias, outputs, inputs};
    Source source = {&product, NULL, 0};
#pragma omp parallel
    {
        Stream stream = start(&source, 1, NULL, NULL, 0);
        multiply(&product, arrange(x, NULL, work, rows, inputs, &stream), NULL, y, rows, &stream);
        release();
    }
}

// to = from / sqrt(mean(from^2) + eps) * weight. size: a multiple of 16.
static void norm_row(const bf16* from, const bf16* weight, bf16* to, long size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += 16) {
        __m512 values = widen(from + i);
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    __m512 factor = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / size + eps));
    for (long i = 0; i < size; i += 16)
        narrow(_mm512_mul_ps(_mm512_mul_ps(widen(from + i), factor), widen(weight + i)), to + i);
}

// Apply norm_row to each row of x[rows, size].
void rms_norm(const bf16* x, const bf16* weight, bf16* y, long rows, long size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > SERIAL)
    for (long row = 0; row < rows; row++) norm_row(x + row * size, weight, y + row * size, size, eps);
}

// e^x with a relative error of 2e-7, 0 for -inf, and NaN for NaN (the result of max is its second argument then).
static __m512 exponential(__m512 x) {
    __m512 scaled = _mm512_mul_ps(_mm512_max_ps(_mm512_set1_ps(-1e4f), x), _mm512_set1_ps(1.44269504f));
    __m512 whole = _mm512_roundscale_ps(scaled, 0), part = _mm512_sub_ps(scaled, whole);
    const float series[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    __m512 power = _mm512_set1_ps(1.5403530e-4f);
    for (int i = 0; i < 6; i++) power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(series[i]));
    return _mm512_scalef_ps(power, whole);
}

// to[size] = silu(gate) * up; from[2 * size] holds gate and up. size: a multiple of 16.
static void gate_row(const bf16* from, bf16* to, long size) {
    for (long i = 0; i < size; i += 16) {
        __m512 value = widen(from + i), up = widen(from + size + i);
        __m512 below = _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), value)));
        narrow(_mm512_mul_ps(_mm512_div_ps(value, below), up), to + i);
    }
}

// Apply gate_row to each row of x[rows, 2 * size].
void gate(const bf16* x, bf16* y, long rows, long size) {
#pragma omp parallel for schedule(static) if (rows * size > SERIAL)
    for (long row = 0; row < rows; row++) gate_row(x + 2 * row * size, y + row * size, size);
}

// Apply RoPE to the first `width` channels of a head. rotation[width / 2] has cosine and sine of the pairs of
// neighbouring channels; width: a multiple of 16.
static void rotate(bf16* head, const float* rotation, long width) {
    for (long i = 0; i < width; i += 16) {
        __m512 turn = _mm512_loadu_ps(rotation + i);
        __m512 cosine = _mm512_moveldup_ps(turn), sine = _mm512_movehdup_ps(turn);
        __m512 pairs = widen(head + i), swapped = _mm512_permute_ps(pairs, 0xB1);
        narrow(_mm512_fmaddsub_ps(pairs, cosine, _mm512_mul_ps(swapped, sine)), head + i);
    }
}

// Apply RoPE to the first `turned` heads of qkv[rows, all, size] in place, and copy the heads from `first` on
// to cache[slots[row, head], size].
void rotate_and_store(bf16* qkv, const float* rotation, const int64_t* slots, bf16* cache, long rows, long all,
                      long turned, long first, long size, long width) {
#pragma omp parallel for schedule(static) if (rows * all * size > SERIAL)
    for (long row = 0; row < rows; row++) {
        bf16* heads = qkv + row * all * size;
        for (long head = 0; head < turned; head++) rotate(heads + head * size, rotation + row * width, width);
        for (long head = first; head < all; head++)
            memcpy(cache + slots[row * (all - first) + head - first] * size, heads + head * size, 2 * size);
    }
}

// scores[context, count of TILE] = keys[context, size] packed^T, with the queries in pairs of channels beside each
// other; see arrange. stream: from which to fetch as many bytes as attention reads, or NULL.
static void score(const bf16* keys, const uint32_t* packed, float* scores, long context, long count, long size,
                  Stream* stream) {
    bf16 rest[TILE * MOST_CHANNELS];
    configure(count, count);
    for (long at = 0; at < context; at += TILE) {
        const bf16* tile = keys + at * size;
        for (long i = 0; stream && i < 4 * TILE * size; i += BLOCK * LINE) fetch(stream);

        // The last tile reads a copy, because the keys of others may follow, or the end of the cache.
        if (context - at < TILE) {
            memset(rest, 0, 2 * TILE * size);
            tile = memcpy(rest, tile, 2 * (context - at) * size);
        }

        multiply_tile(tile, size, packed, count, scores + at * TILE);
    }
}

// Replace scores[context, count of TILE] by e^(scale * score + mask - highest), for all queries at once, and set
// inverse[count] to 1 / their sum. tokens: where the mask of each query's token begins; if mask is NULL, the last
// key that the query sees.
static void soften(float* scores, const float* mask, const int* tokens, float* inverse, long context, long count,
                   float scale) {
    __mmask16 used = (1u << count) - 1;
    __m512 highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    __m512i token = _mm512_loadu_si512(tokens);
    for (long at = 0; at < context; at++) {
        __m512 value = _mm512_maskz_loadu_ps(used, scores + at * TILE), hidden;
        if (mask) {
            hidden = _mm512_i32gather_ps(token, mask + at, 4);
        } else {
            __mmask16 later = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(at), token);
            hidden = _mm512_maskz_mov_ps(later, _mm512_set1_ps(-INFINITY));
        }
        value = _mm512_fmadd_ps(value, _mm512_set1_ps(scale), hidden);
        _mm512_mask_storeu_ps(scores + at * TILE, used, value);
        highest = _mm512_max_ps(highest, value);
    }

    for (long at = 0; at < context; at++) {
        __m512 value = _mm512_maskz_loadu_ps(used, scores + at * TILE);
        value = exponential(_mm512_sub_ps(value, highest));
        _mm512_mask_storeu_ps(scores + at * TILE, used, value);
        total = _mm512_add_ps(total, value);
    }
    _mm512_storeu_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1), total));
}

// Average 32 channels of values[context, size] for up to four queries: to[i] gets the average with the weights
// scores[context, first + i] * inverse[first + i].
static void average(const bf16* values, const float* scores, const float* inverse, bf16* const* to, long first,
                    long context, long count, long size) {
    __m512 sums[4][2];
    long queries[4];
    for (int i = 0; i < 4; i++) {
        // Beyond the last query, repeat it.
        queries[i] = first + i < count ? first + i : count - 1;
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    }
    for (long at = 0; at < context; at++) {
        __m512 near = widen(values + at * size), far = widen(values + at * size + 16);
        for (int i = 0; i < 4; i++) {
            __m512 weight = _mm512_set1_ps(scores[at * TILE + queries[i]]);
            sums[i][0] = _mm512_fmadd_ps(weight, near, sums[i][0]);
            sums[i][1] = _mm512_fmadd_ps(weight, far, sums[i][1]);
        }
    }
    for (int i = 0; i < 4 && first + i < count; i++) {
        __m512 weight = _mm512_set1_ps(inverse[first + i]);
        narrow(_mm512_mul_ps(sums[i][0], weight), to[i]);
        narrow(_mm512_mul_ps(sums[i][1], weight), to[i] + 16);
    }
}

// The bytes that attend_head needs, a multiple of a cache line.
static size_t attention_bytes(const Attention* attention) {
    return sizeof(float) * TILE * (attention->length + TILE);
}

// Compute the attention of one row's queries to one of its key heads.
static void attend_head(const Attention* a, long row, long head, float* scores, Stream* stream) {
    float inverse[TILE];
    uint32_t packed[MOST_CHANNELS / 2 * TILE];
    int tokens[TILE];
    bf16* to[TILE];

    long group = a->group, size = a->size, queries = a->width * group, context = a->contexts[row];
    const bf16* key = a->keys + row * a->cached + head * a->spaced;
    const bf16* value = a->values + row * a->cached + head * a->spaced;

    for (long start = 0; start < queries; start += TILE) {
        long count = queries - start < TILE ? queries - start : TILE;
        for (long i = 0; i < TILE; i++) {
            long which = start + (i < count ? i : count - 1), token = row * a->width + which / group;
            long at = (head * group + which % group) * size;
            tokens[i] = a->mask ? which / group * a->apart : a->positions[token];
            to[i] = a->y + token * a->kv_heads * group * size + at;
            for (long pair = 0; i < count && pair < size / 2; pair++)
                memcpy(packed + pair_at(i, pair, count, size / 2), a->query + token * a->stride + at + 2 * pair, 4);
        }

        score(key, packed, scores, context, count, size, start ? NULL : stream);
        const float* mask = a->mask ? a->mask + row * a->covered : NULL;
        soften(scores, mask, tokens, inverse, context, count, a->scale);
        for (long first = 0; first < count; first += 4)
            for (long channel = 0; channel < size; channel += 32) {
                bf16* part[4];
                for (int i = 0; i < 4; i++) part[i] = to[first + i] + channel;
                average(value + channel, scores, inverse, part, first, context, count, size);
            }
    }
}

void attend(const Attention* attention) {
    size_t bytes = attention_bytes(attention);
    char* own = keep_for_threads(bytes);
    Source source = {NULL, attention, 0};
#pragma omp parallel
    {
        Stream stream = start(&source, 1, attention, own, bytes);
        for (long i = stream.first; i < stream.last; i++)
            attend_head(attention, i / attention->kv_heads, i % attention->kv_heads, stream.own, &stream);
        release();
    }
}

// The tokens of one span in a pass: the slot in its row of each token's key, the cosines and sines of all
// positions, see rotate_and_store, and the attention without query, y and the sizes that the layer has.
typedef struct {
    const int64_t* places;
    const float* rotations;
    Attention attention;
} Pass;

// Norm and rotate the queries and keys of one row that belong to one key head, and store key and value.
static void place(const Layer* layer, bf16* qkv, const Pass* pass, long row, long head) {
    const Attention* a = &pass->attention;
    long size = layer->size, group = layer->heads / layer->kv_heads, at = row * a->cached + head * a->spaced;
    for (long token = row * a->width; token < (row + 1) * a->width; token++) {
        bf16* heads = qkv + token * (layer->heads + 2 * layer->kv_heads) * size;
        bf16 *query = heads + head * group * size, *key = heads + (layer->heads + head) * size;
        const float* rotation = pass->rotations + a->positions[token] * layer->rotary;
        for (long i = 0; i <= group; i++) {
            bf16* turned = i < group ? query + i * size : key;
            const bf16* norm = i < group ? layer->query_norm : layer->key_norm;
            if (norm) norm_row(turned, norm, turned, size, layer->eps);
            rotate(turned, rotation, layer->rotary);
        }
        memcpy(a->keys + at + pass->places[token] * size, key, 2 * size);
        memcpy(a->values + at + pass->places[token] * size, key + layer->kv_heads * size, 2 * size);
    }
}

// Memory for what is computed within layers; `filled` and `beside` hold inputs of products that the threads share.
// own: `bytes` for each thread.
typedef struct {
    bf16 *joined, *between, *qkv, *attended, *both, *filled;
    void* beside;
    char* own;
    size_t bytes;
} Space;

// Reserve it for a layer, and set what its attention reads and writes.
static Space reserve(const Layer* layer, Attention* attention) {
    const Product* of = layer->products;
    long tokens = attention->rows * attention->width;
    long hidden = of[QKV].inputs, all = of[QKV].outputs, queries = of[OUTPUT].inputs, inner = of[DOWN].inputs;
    long widest = inner > 2 * hidden ? inner : 2 * hidden;
    if (queries > widest) widest = queries;

    static _Thread_local Kept kept;
    long wanted = tokens * (2 * hidden + all + queries + 2 * inner + 2 * widest);
    Space space = {.joined = keep(&kept, sizeof(bf16) * wanted), .bytes = attention_bytes(attention)};
    size_t few = sizeof(bf16) * 2 * FEW * widest;
    if (space.bytes < few) space.bytes = few;
    space.own = keep_for_threads(space.bytes);
    space.between = space.joined + tokens * hidden;
    space.qkv = space.between + tokens * hidden;
    space.attended = space.qkv + tokens * all;
    space.both = space.attended + tokens * queries;
    space.filled = space.both + tokens * 2 * inner;
    space.beside = space.filled + tokens * widest;

    attention->query = space.qkv;
    attention->y = space.attended;
    attention->kv_heads = layer->kv_heads;
    attention->group = layer->heads / layer->kv_heads;
    attention->size = layer->size;
    attention->stride = all;
    attention->scale = layer->scale;
    return space;
}

// Norm the rows of x[rows, size] with a weight, or gate the rows of x[rows, 2 * size] if norm is NULL, and arrange
// them for a product. A few rows each thread prepares for itself, because to wait for another takes longer.
static const void* prepare(const bf16* x, const bf16* norm, float eps, long rows, long size, const Space* space,
                           const Stream* stream) {
    int alone = rows <= FEW;
    bf16* to = alone ? stream->own : space->filled;
    for (long row = alone ? 0 : stream->thread; row < rows; row += alone ? 1 : stream->threads) {
        if (norm) norm_row(x + row * size, norm, to + row * size, size, eps);
        if (!norm) gate_row(x + 2 * row * size, to + row * size, size);
    }
    if (!alone) {
#pragma omp barrier
    }
    return arrange(to, alone ? to + rows * size : NULL, space->beside, rows, size, stream);
}

// Run a layer over x[tokens, hidden]; y may be x.
static void run_layer(const Layer* layer, const bf16* x, bf16* y, const Pass* pass, const Space* space,
                      Stream* stream) {
    const Product* of = layer->products;
    const Attention* a = &pass->attention;
    long tokens = a->rows * a->width;

    const void* beside = prepare(x, layer->input_norm, layer->eps, tokens, of[QKV].inputs, space, stream);
    multiply(of + QKV, beside, NULL, space->qkv, tokens, stream);
#pragma omp barrier

    for (long i = stream->first; i < stream->last; i++) {
        place(layer, space->qkv, pass, i / a->kv_heads, i % a->kv_heads);
        attend_head(a, i / a->kv_heads, i % a->kv_heads, stream->own, stream);
    }
#pragma omp barrier
    void* own = tokens <= FEW ? stream->own : NULL;
    beside = arrange(space->attended, own, space->beside, tokens, of[OUTPUT].inputs, stream);
    multiply(of + OUTPUT, beside, x, space->between, tokens, stream);
#pragma omp barrier

    x = space->between;
    beside = prepare(x, layer->post_norm, layer->eps, tokens, of[GATE_UP].inputs, space, stream);
    multiply(of + GATE_UP, beside, NULL, space->both, tokens, stream);
#pragma omp barrier

    beside = prepare(space->both, NULL, 0, tokens, of[DOWN].inputs, space, stream);
    multiply(of + DOWN, beside, x, y, tokens, stream);
#pragma omp barrier
}

// Write what a layer reads, in this order, to sources[PRODUCTS + 1].
static void append(Source* sources, const Layer* layer, const Attention* attention, long shift) {
    const Product* of = layer->products;
    const Source all[] = {{of + QKV, NULL, 0}, {NULL, attention, shift}, {of + OUTPUT, NULL, 0},
                          {of + GATE_UP, NULL, 0}, {of + DOWN, NULL, 0}};
    memcpy(sources, all, sizeof all);
}

// Run layers of the same sizes over x[tokens, hidden], the input of the first. As one call, because between the
// kernels Python takes as long as the kernels do with a single token. first: the pass of the first layer; keys
// and values of the next are `following` elements behind.
void run_layers(const Layer* layers, long count, const bf16* x, bf16* y, const Pass* first, long following) {
    Pass pass = *first;
    Space space = reserve(layers, &pass.attention);
    Source* sources = malloc(sizeof *sources * (PRODUCTS + 1) * count);
    for (long i = 0; i < count; i++) append(sources + (PRODUCTS + 1) * i, layers + i, &pass.attention, following * i);

#pragma omp parallel
    {
        Stream stream = start(sources, (PRODUCTS + 1) * count, &pass.attention, space.own, space.bytes);
        Pass own = pass;
        for (long i = 0; i < count; i++) {
            run_layer(layers + i, i ? y : x, y, &own, &space, &stream);
            own.attention.keys += following;
            own.attention.values += following;
        }
        release();
    }
    free(sources);
}

// An MTP layer: joined[hidden, 2 * hidden] reads the normed state, then the normed embedding of the next token.
typedef struct {
    Layer layer;
    Product joined;
    const bf16 *hidden_norm, *token_norm, *final_norm;
} Draft;

// Run an MTP layer over the states x[count, hidden] and the tokens after them, which are `apart` elements apart;
// y[count, hidden] may be x. embedding[vocab, hidden].
static void run_draft_layer(const Draft* draft, const bf16* x, const int64_t* tokens, long apart,
                            const bf16* embedding, bf16* y, const Pass* pass, const Space* space, Stream* stream) {
    const Layer* layer = &draft->layer;
    long count = pass->attention.rows * pass->attention.width, hidden = layer->products[QKV].inputs;
    for (long row = stream->thread; row < count; row += stream->threads) {
        bf16* both = space->filled + row * 2 * hidden;
        norm_row(x + row * hidden, draft->hidden_norm, both, hidden, layer->eps);
        norm_row(embedding + tokens[row * apart] * hidden, draft->token_norm, both + hidden, hidden, layer->eps);
    }
#pragma omp barrier
    const void* beside = arrange(space->filled, NULL, space->beside, count, 2 * hidden, stream);
    multiply(&draft->joined, beside, NULL, space->joined, count, stream);
#pragma omp barrier

    run_layer(layer, space->joined, y, pass, space, stream);
    for (long row = stream->thread; row < count; row += stream->threads)
        norm_row(y + row * hidden, draft->final_norm, y + row * hidden, hidden, layer->eps);
#pragma omp barrier
}

// Run an MTP layer over x and tokens; see run_draft_layer.
void run_draft(const Draft* draft, const bf16* x, const int64_t* tokens, const bf16* embedding, bf16* y,
               const Pass* given) {
    Pass pass = *given;
    Space space = reserve(&draft->layer, &pass.attention);
    Source sources[PRODUCTS + 2] = {{&draft->joined, NULL, 0}};
    append(sources + 1, &draft->layer, &pass.attention, 0);

#pragma omp parallel
    {
        Stream stream = start(sources, PRODUCTS + 2, &pass.attention, space.own, space.bytes);
        run_draft_layer(draft, x, tokens, 1, embedding, y, &pass, &space, &stream);
        release();
    }
}

// Write softmax and, unless logs is NULL, log-softmax of logits[vocab] / temperature, and return the entropy then.
// vocab: a multiple of 16.
static float distribution(const bf16* logits, float temperature, float* logs, float* p, long vocab) {
    __m512 divisor = _mm512_set1_ps(temperature), most = _mm512_set1_ps(-INFINITY);
    for (long i = 0; i < vocab; i += 16) {
        __m512 value = _mm512_div_ps(widen(logits + i), divisor);
        _mm512_storeu_ps(p + i, value);
        most = _mm512_max_ps(most, value);
    }

    __m512 highest = _mm512_set1_ps(_mm512_reduce_max_ps(most)), total = _mm512_setzero_ps();
    for (long i = 0; i < vocab; i += 16) {
        __m512 value = _mm512_sub_ps(_mm512_loadu_ps(p + i), highest), power = exponential(value);
        if (logs) _mm512_storeu_ps(logs + i, value);
        _mm512_storeu_ps(p + i, power);
        total = _mm512_add_ps(total, power);
    }

    float sum = _mm512_reduce_add_ps(total);
    __m512 inverse = _mm512_set1_ps(1 / sum), shift = _mm512_set1_ps(logf(sum)), mean = _mm512_setzero_ps();
    for (long i = 0; i < vocab; i += 16) {
        __m512 share = _mm512_mul_ps(_mm512_loadu_ps(p + i), inverse);
        _mm512_storeu_ps(p + i, share);
        if (logs) {
            __m512 value = _mm512_sub_ps(_mm512_loadu_ps(logs + i), shift);
            _mm512_storeu_ps(logs + i, value);
            mean = _mm512_fmadd_ps(share, value, mean);
        }
    }
    return -_mm512_reduce_add_ps(mean);
}

// Log-softmax, softmax and entropy of each row of logits[rows, vocab] / temperature[rows]. temperature: NULL
// for 1. log_p[rows, vocab] and entropy[rows]: both NULL if only p[rows, vocab] is wanted. vocab: a multiple
// of 16.
void distributions(const bf16* logits, const float* temperature, float* log_p, float* p, float* entropy,
                   long rows, long vocab) {
#pragma omp parallel for schedule(static) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        float* logs = log_p ? log_p + row * vocab : NULL;
        float divisor = temperature ? temperature[row] : 1;
        float value = distribution(logits + row * vocab, divisor, logs, p + row * vocab, vocab);
        if (entropy) entropy[row] = value;
    }
}

// Sample from weights[vocab] >= 0 by inverse CDF in float64; -1 if they have no mass, or a NaN among them.
// vocab: a multiple of 16. until: space for the CDF at the end of each group.
static long draw(const float* weights, double uniform, double* until, long vocab) {
    double mass = 0;
    for (long start = 0, group = 0; start < vocab; start += GROUP, group++) {
        __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
        for (long i = start; i < vocab && i < start + GROUP; i += 16) {
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm256_loadu_ps(weights + i)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm256_loadu_ps(weights + i + 8)));
        }
        until[group] = mass += _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    }
    if (!(mass > 0)) return -1;

    // If rounding puts the threshold at the total, the token is the last one with weight.
    double threshold = mass * uniform, cdf = 0;
    long group = 0;
    while (until[group] <= threshold && until[group] < mass) cdf = until[group++];
    long token = group * GROUP, end = token + GROUP < vocab ? token + GROUP : vocab, last = token;
    for (; token < end; token++) {
        cdf += weights[token];
        if (weights[token] > 0) last = token;
        if (cdf > threshold) return token;
    }
    return last;
}

// The elements that draw needs.
static long groups(long vocab) { return (vocab + GROUP - 1) / GROUP; }

// Sample a token from each row of weights[rows, vocab]; see draw. Returns the number of rows without a token.
long sample(const float* weights, const double* uniforms, int64_t* tokens, long rows, long vocab) {
    double* space = (double*)keep_for_threads(sizeof(double) * groups(vocab));
    long failed = 0;
#pragma omp parallel for schedule(static) reduction(+ : failed) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        double* until = space + omp_get_thread_num() * groups(vocab);
        tokens[row] = draw(weights + row * vocab, uniforms[row], until, vocab);
        failed += tokens[row] < 0;
    }
    return failed;
}

// A chain of drafts. states[rows, hidden]: of the MTP layer at depth 1. ids[size]: the tokens that the head's
// outputs stand for; NULL if these are the tokens. temperature[rows]: NULL for 1. greedy[rows]: rows whose
// distribution is 1 at the most likely token; NULL for none. uniforms[rows, depths]. tokens[rows, depths + 1]: given
// the pending token of each row, the drafts are written after it. Also writes columns[rows, depths], the drafts as
// indices of q[rows, depths, size], their distributions.
typedef struct {
    const bf16 *states, *embedding;
    const int64_t* ids;
    const float* temperature;
    const uint8_t* greedy;
    const double* uniforms;
    int64_t *tokens, *columns;
    float* q;
    long depths;
} Chain;

// Draft a token of a row from logits[size]; returns 1 if there is none. until: see draw.
static long draft_token(const Chain* chain, long row, long depth, const bf16* logits, double* until, long size) {
    long at = row * chain->depths + depth, column = 0;
    float* q = chain->q + at * size;
    distribution(logits, chain->temperature ? chain->temperature[row] : 1, NULL, q, size);
    if (chain->greedy && chain->greedy[row]) {
        for (long i = 1; i < size; i++)
            if (q[i] > q[column]) column = i;
        memset(q, 0, sizeof(float) * size);
        q[column] = 1;
    } else {
        column = draw(q, chain->uniforms[at], until, size);
    }

    long failed = column < 0;
    if (failed) column = 0;
    chain->columns[at] = column;
    chain->tokens[row * (chain->depths + 1) + depth + 1] = chain->ids ? chain->ids[column] : column;
    return failed;
}

// Draft a chain with an MTP layer, which after depth 1 reads its own state and the token drafted from it. given: the
// pass over the pending tokens and the drafts. Returns the number of drafts that could not be sampled.
long draft_chain(const Draft* draft, const Product* head, const Chain* chain, const Pass* given) {
    Pass pass = *given;
    long rows = pass.attention.rows, width = pass.attention.width, size = head->outputs, failed = 0;
    pass.attention.width = 1;
    Space space = reserve(&draft->layer, &pass.attention);

    // The threads' space to sample, then slots and positions, the states of deeper tokens, and logits.
    static _Thread_local Kept kept;
    long threads = omp_get_max_threads(), numbers = threads * groups(size) + 2 * rows * chain->depths;
    double* until = keep(&kept, sizeof(double) * numbers + sizeof(bf16) * rows * (head->inputs + size));
    int64_t* places = (int64_t*)(until + threads * groups(size));
    int64_t* positions = places + rows * chain->depths;
    bf16 *deeper = (bf16*)(until + numbers), *logits = deeper + rows * head->inputs;
    for (long depth = 0; depth < chain->depths; depth++)
        for (long row = 0; row < rows; row++) {
            places[depth * rows + row] = given->places[row * width + depth];
            positions[depth * rows + row] = given->attention.positions[row * width + depth];
        }

    long later = PRODUCTS + 3, count = 1 + later * (chain->depths - 1);
    Source* sources = malloc(sizeof *sources * count);
    sources[0] = (Source){head, NULL, 0};
    for (long i = 1; i < count; i += later) {
        sources[i] = (Source){&draft->joined, NULL, 0};
        append(sources + i + 1, &draft->layer, &pass.attention, 0);
        sources[i + later - 1] = sources[0];
    }

#pragma omp parallel reduction(+ : failed)
    {
        Stream stream = start(sources, count, &pass.attention, space.own, space.bytes);
        Pass own = pass;
        const bf16* states = chain->states;
        for (long depth = 0; depth < chain->depths; depth++) {
            if (depth) {
                own.places = places + (depth - 1) * rows;
                own.attention.positions = positions + (depth - 1) * rows;
                run_draft_layer(draft, states, chain->tokens + depth, chain->depths + 1, chain->embedding, deeper,
                                &own, &space, &stream);
                states = deeper;
            }

            multiply(head, arrange(states, NULL, space.beside, rows, head->inputs, &stream), NULL, logits, rows,
                     &stream);
#pragma omp barrier
            for (long row = stream.thread; row < rows; row += stream.threads)
                failed += draft_token(chain, row, depth, logits + row * size, until + stream.thread * groups(size),
                                      size);
#pragma omp barrier
        }
        release();
    }
    free(sources);
    return failed;
}

// Verify a chain of drafts by rejection sampling; see spec/verify/chain.py. p[rows, drafts + 1, vocab]: target.
// q[rows, drafts, size]: draft, over the tokens ids[size], or over all if ids is NULL. columns[rows, drafts]: the
// drafts as indices of q. coins[rows, drafts], uniforms[rows]. Writes accepted[rows], next[rows] and
// accept_prob[rows, drafts]. Returns the number of rows without a token, because p has a NaN.
long verify_chain(const float* p, const float* q, const int64_t* ids, const int64_t* columns, const double* coins,
                  const double* uniforms, int64_t* accepted, int64_t* next, float* accept_prob, long rows,
                  long drafts, long vocab, long size) {
    long space = groups(vocab) + vocab / 2, failed = 0;
    double* own = (double*)keep_for_threads(sizeof(double) * space);
#pragma omp parallel for schedule(static) reduction(+ : failed) if (rows > 1)
    for (long row = 0; row < rows; row++) {
        const float *target = p + row * (drafts + 1) * vocab, *draft = q + row * drafts * size;
        long count = 0, rejected = 0;
        for (long i = 0; i < drafts; i++) {
            long column = columns[row * drafts + i], token = ids ? ids[column] : column;
            float wanted = target[i * vocab + token], offered = draft[i * size + column];
            float ratio = wanted / offered;
            accept_prob[row * drafts + i] = isnan(ratio) ? 0 : ratio > 1 ? 1 : ratio;
            if (!(coins[row * drafts + i] * offered < wanted)) rejected = 1;
            if (!rejected) count++;
        }
        accepted[row] = count;
        target += count * vocab;
        draft += count * size;

        double* until = own + omp_get_thread_num() * space;
        float* residual = (float*)(until + groups(vocab));
        long token = -1;
        if (rejected) {
            // max(p - q, 0), in which a NaN stays one.
            memcpy(residual, target, 4 * vocab);
            for (long i = 0; i < size; i++) {
                long at = ids ? ids[i] : i;
                float left = target[at] - draft[i];
                residual[at] = left < 0 ? 0 : left;
            }
            token = draw(residual, uniforms[row], until, vocab);
        }
        next[row] = token < 0 ? draw(target, uniforms[row], until, vocab) : token;
        failed += next[row] < 0;
    }
    return failed;
}
