// The kernels of amx.py: a decode step in bfloat16 on CPUs with AMX.
//
// A decode step reads every weight once for a few rows, so it cannot be faster than the memory. These kernels
// read weights row by row, as a checkpoint stores them, and fetch the next rows while they multiply. Sums are
// in float32 and rounded to bfloat16 once. Each output is computed by one thread, in the same order for any
// number of rows and threads. MOST_CHANNELS, the largest size of a head, is set by amx.py.

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

enum {
    TILE = 16,     // rows of a tile, and float32 columns
    STEP = 32,     // bfloat16 columns of a tile
    BLOCK = 32,    // outputs, and input rows, that are computed at once
    SERIAL = 8192  // elements up to which a second thread does not pay
};

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

static __m512 widen(const bf16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((void*)from)), 16));
}

static void narrow(__m512 values, bf16* to) {
    _mm256_storeu_si256((void*)to, (__m256i)_mm512_cvtneps_pbh(values));
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

// y[rows, outputs] = x[rows, inputs] weight[outputs, inputs]^T + bias + residual[rows, outputs], the last two
// unless NULL. inputs: a multiple of 32. outputs: at least 32. work: space for rows * inputs elements.
void linear(const bf16* weight, const bf16* bias, const bf16* x, const bf16* residual, bf16* y, void* work,
            long rows, long outputs, long inputs) {
    uint32_t* beside = work;

#pragma omp parallel
    {
        // AMX takes pairs of columns as one number, and these with the rows beside each other.
#pragma omp for schedule(static)
        for (long pair = 0; pair < inputs / 2; pair++)
            for (long row = 0; row < rows; row++)
                memcpy(beside + pair * rows + row, x + row * inputs + 2 * pair, 4);

        float sums[TILE * TILE] __attribute__((aligned(64)));
        long before = -1;

#pragma omp for schedule(static)
        for (long block = 0; block < (outputs + BLOCK - 1) / BLOCK; block++) {
            // The last block overlaps the one before it where outputs is no multiple; both write the same.
            long output = block * BLOCK > outputs - BLOCK ? outputs - BLOCK : block * BLOCK;
            const bf16 *upper = weight + output * inputs, *lower = upper + TILE * inputs;

            for (long row = 0; row < rows; row += BLOCK) {
                long left = rows - row < BLOCK ? rows - row : BLOCK;
                long first = left < TILE ? left : TILE, second = left - first;
                if (left != before) configure(first, second ? second : TILE);
                before = left;

                _tile_zero(0);
                _tile_zero(2);
                if (second) {
                    _tile_zero(1);
                    _tile_zero(3);
                }
                for (long input = 0; input < inputs; input += STEP) {
                    const uint32_t* packed = beside + input / 2 * rows + row;
                    _tile_loadd(4, upper + input, 2 * inputs);
                    _tile_loadd(5, lower + input, 2 * inputs);
                    _tile_loadd(6, packed, 4 * rows);

                    // Fetch the next block's weights; each step reads one cache line of every output.
                    if (row == 0)
                        for (int i = 0; i < BLOCK; i++)
                            _mm_prefetch((const char*)(upper + (BLOCK + i) * inputs + input), _MM_HINT_T1);

                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(2, 5, 6);
                    if (second) {
                        _tile_loadd(7, packed + TILE, 4 * rows);
                        _tile_dpbf16ps(1, 4, 7);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }

                for (int tile = 0; tile < (second ? 4 : 3); tile++) {
                    long at = output + tile / 2 * TILE, from = (row + tile % 2 * TILE) * outputs + at;
                    if (tile == 0) _tile_stored(0, sums, 4 * TILE);
                    if (tile == 1 && second) _tile_stored(1, sums, 4 * TILE);
                    if (tile == 2) _tile_stored(2, sums, 4 * TILE);
                    if (tile == 3) _tile_stored(3, sums, 4 * TILE);
                    if (tile % 2 == 0 || second)
                        write(sums, bias ? bias + at : NULL, residual ? residual + from : NULL, y + from,
                              tile % 2 ? second : first, outputs);
                }
            }
        }
        _tile_release();
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight, for each row of x[rows, size]. size: a multiple of 16.
void rms_norm(const bf16* x, const bf16* weight, bf16* y, long rows, long size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > SERIAL)
    for (long row = 0; row < rows; row++) {
        const bf16* from = x + row * size;
        __m512 squares = _mm512_setzero_ps();
        for (long i = 0; i < size; i += 16) {
            __m512 values = widen(from + i);
            squares = _mm512_fmadd_ps(values, values, squares);
        }
        __m512 factor = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / size + eps));
        for (long i = 0; i < size; i += 16)
            narrow(_mm512_mul_ps(_mm512_mul_ps(widen(from + i), factor), widen(weight + i)), y + row * size + i);
    }
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

// y[rows, size] = silu(gate) * up; x[rows, 2 * size] holds gate and up. size: a multiple of 16.
void gate(const bf16* x, bf16* y, long rows, long size) {
#pragma omp parallel for schedule(static) if (rows * size > SERIAL)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < size; i += 16) {
            __m512 value = widen(x + 2 * row * size + i), up = widen(x + (2 * row + 1) * size + i);
            __m512 below = _mm512_add_ps(
                _mm512_set1_ps(1), exponential(_mm512_sub_ps(_mm512_setzero_ps(), value)));
            narrow(_mm512_mul_ps(_mm512_div_ps(value, below), up), y + row * size + i);
        }
}

// Apply RoPE to the first `turned` heads of qkv[rows, all, size] in place, and copy the heads from `first` on
// to cache[slots[row, head], size]. rotation[rows, width / 2] has cosine and sine of the pairs of neighbouring
// channels; width: a multiple of 16.
void rotate_and_store(bf16* qkv, const float* rotation, const int64_t* slots, bf16* cache, long rows, long all,
                      long turned, long first, long size, long width) {
#pragma omp parallel for schedule(static) if (rows * all * size > SERIAL)
    for (long row = 0; row < rows; row++) {
        bf16* heads = qkv + row * all * size;
        for (long i = 0; i < width; i += 16) {
            __m512 turn = _mm512_loadu_ps(rotation + row * width + i);
            __m512 cosine = _mm512_moveldup_ps(turn), sine = _mm512_movehdup_ps(turn);
            for (long head = 0; head < turned; head++) {
                __m512 pairs = widen(heads + head * size + i), swapped = _mm512_permute_ps(pairs, 0xB1);
                narrow(_mm512_fmaddsub_ps(pairs, cosine, _mm512_mul_ps(swapped, sine)), heads + head * size + i);
            }
        }
        for (long head = first; head < all; head++)
            memcpy(cache + slots[row * (all - first) + head - first] * size, heads + head * size, 2 * size);
    }
}

// scores[context, count] = keys[context, size] packed^T, with the queries in pairs of channels beside each other;
// see linear. Meanwhile fetches the values, which are needed after the softmax.
static void score(const bf16* keys, const bf16* values, const uint32_t* packed, float* scores, long context,
                  long count, long size) {
    bf16 rest[TILE * MOST_CHANNELS];
    configure(count, count);
    for (long at = 0; at < context; at += TILE) {
        const bf16* tile = keys + at * size;
        for (long i = 0; i < TILE * size; i += STEP)
            _mm_prefetch((const char*)(values + at * size + i), _MM_HINT_T1);

        // The last tile reads a copy, because the keys of others may follow, or the end of the cache.
        if (context - at < TILE) {
            memset(rest, 0, 2 * TILE * size);
            tile = memcpy(rest, tile, 2 * (context - at) * size);
        }

        _tile_zero(0);
        for (long i = 0; i < size; i += STEP) {
            _tile_loadd(4, tile + i, 2 * size);
            _tile_loadd(6, packed + i / 2 * count, 4 * count);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, scores + at * count, 4 * count);
    }
}

// Replace scores[context, count] by e^(scale * score + mask - highest), for all queries at once, and set
// inverse[count] to 1 / their sum. tokens: where the mask of each query's token begins.
static void soften(float* scores, const float* mask, const int* tokens, float* inverse, long context, long count,
                   float scale) {
    __mmask16 used = (1u << count) - 1;
    __m512 highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    __m512i begin = _mm512_loadu_si512(tokens);
    int single = tokens[0] == tokens[count - 1];
    for (long at = 0; at < context; at++) {
        __m512 value = _mm512_maskz_loadu_ps(used, scores + at * count);
        __m512 hidden = single ? _mm512_set1_ps(mask[tokens[0] + at]) : _mm512_i32gather_ps(begin, mask + at, 4);
        value = _mm512_fmadd_ps(value, _mm512_set1_ps(scale), hidden);
        _mm512_mask_storeu_ps(scores + at * count, used, value);
        highest = _mm512_max_ps(highest, value);
    }

    for (long at = 0; at < context; at++) {
        __m512 value = _mm512_maskz_loadu_ps(used, scores + at * count);
        value = exponential(_mm512_sub_ps(value, highest));
        _mm512_mask_storeu_ps(scores + at * count, used, value);
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
            __m512 weight = _mm512_set1_ps(scores[at * count + queries[i]]);
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

// Attention of a few queries of each row over the row's keys, with grouped heads.
//
// query[rows * width, ...] with `stride` elements for each token; its heads come first. keys, values: the
// first key and value head of each row are `cached` elements apart, heads `spaced` elements. mask: added to the
// scaled scores of a token; rows are `covered` elements apart, tokens `apart`. contexts[rows]: the number of
// keys to read, at most length. y[rows * width, kv_heads * group * size]. size: a multiple of 32, at most
// MOST_CHANNELS.
void attend(const bf16* query, const bf16* keys, const bf16* values, const float* mask, const int64_t* contexts,
            bf16* y, long rows, long width, long kv_heads, long group, long size, long length, long stride,
            long cached, long spaced, long covered, long apart, float scale) {
    long queries = width * group;
#pragma omp parallel
    {
        float *scores = malloc(sizeof(float) * TILE * (length + TILE)), inverse[TILE];
        uint32_t packed[MOST_CHANNELS / 2 * TILE];
        int tokens[TILE];
        bf16* to[TILE];

#pragma omp for collapse(2) schedule(dynamic)
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < kv_heads; head++)
                for (long start = 0; start < queries; start += TILE) {
                    long count = queries - start < TILE ? queries - start : TILE, context = contexts[row];
                    const bf16* key = keys + row * cached + head * spaced;
                    const bf16* value = values + row * cached + head * spaced;

                    for (long i = 0; i < TILE; i++) {
                        long which = start + (i < count ? i : count - 1), token = row * width + which / group;
                        long at = (head * group + which % group) * size;
                        tokens[i] = which / group * apart;
                        to[i] = y + token * kv_heads * group * size + at;
                        for (long pair = 0; i < count && pair < size / 2; pair++)
                            memcpy(packed + pair * count + i, query + token * stride + at + 2 * pair, 4);
                    }

                    score(key, value, packed, scores, context, count, size);
                    soften(scores, mask + row * covered, tokens, inverse, context, count, scale);
                    for (long first = 0; first < count; first += 4)
                        for (long channel = 0; channel < size; channel += 32) {
                            bf16* part[4];
                            for (int i = 0; i < 4; i++) part[i] = to[first + i] + channel;
                            average(value + channel, scores, inverse, part, first, context, count, size);
                        }
                }
        free(scores);
        _tile_release();
    }
}

// The weights and sizes of a decoder layer with grouped heads and one gated MLP. Biases: NULL for none.
typedef struct {
    const bf16 *input_norm, *qkv, *qkv_bias, *output, *output_bias, *post_norm, *gate_up, *gate_up_bias, *down,
        *down_bias;
    long hidden, heads, kv_heads, size, rotary, inner;
    float eps, scale;
} Layer;

// Run a layer over the tokens x[rows * width, hidden] of one span; other arguments as above. As one call,
// because between the kernels Python takes as long as the kernels do with a single token.
void layer(const Layer* layer, const bf16* x, bf16* y, const float* rotation, const int64_t* slots, bf16* cache,
           const bf16* keys, const bf16* values, const float* mask, const int64_t* contexts, long rows, long width,
           long length, long cached, long spaced, long covered, long apart) {
    long tokens = rows * width, hidden = layer->hidden, inner = layer->inner, size = layer->size;
    long all = layer->heads + 2 * layer->kv_heads, queries = layer->heads * size;
    long widest = inner > hidden ? inner : hidden;
    if (queries > widest) widest = queries;

    // Kept for the thread's next call, because the system would clear new memory each time.
    static _Thread_local bf16* memory = NULL;
    static _Thread_local long capacity = 0;
    long wanted = tokens * (2 * hidden + all * size + queries + 3 * inner + widest);
    if (wanted > capacity) {
        free(memory);
        memory = malloc(sizeof(bf16) * (capacity = wanted));
    }
    bf16 *normed = memory, *between = normed + tokens * hidden, *qkv = between + tokens * hidden;
    bf16 *attended = qkv + tokens * all * size, *both = attended + tokens * queries;
    bf16 *gated = both + 2 * tokens * inner, *work = gated + tokens * inner;

    rms_norm(x, layer->input_norm, normed, tokens, hidden, layer->eps);
    linear(layer->qkv, layer->qkv_bias, normed, NULL, qkv, work, tokens, all * size, hidden);
    rotate_and_store(qkv, rotation, slots, cache, tokens, all, layer->heads + layer->kv_heads, layer->heads, size,
                     layer->rotary);
    attend(qkv, keys, values, mask, contexts, attended, rows, width, layer->kv_heads,
           layer->heads / layer->kv_heads, size, length, all * size, cached, spaced, covered, apart, layer->scale);
    linear(layer->output, layer->output_bias, attended, x, between, work, tokens, hidden, queries);

    rms_norm(between, layer->post_norm, normed, tokens, hidden, layer->eps);
    linear(layer->gate_up, layer->gate_up_bias, normed, NULL, both, work, tokens, 2 * inner, hidden);
    gate(both, gated, tokens, inner);
    linear(layer->down, layer->down_bias, gated, between, y, work, tokens, hidden, inner);
}
