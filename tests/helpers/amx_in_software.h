// AMX's tiles in plain C, so that the kernels' code for AMX can be tested on any CPU with AVX-512:
//
//     gcc -march=skylake-avx512 -include amx_in_software.h ... cpu_kernels.c
//
// As the instructions do, these fault if a tile's sizes do not fit.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_BF16__ 1
#undef _tile_loadconfig
#define _tile_loadconfig soft_loadconfig
#undef _tile_release
#define _tile_release soft_release
#undef _tile_zero
#define _tile_zero soft_zero
#undef _tile_loadd
#define _tile_loadd soft_loadd
#undef _tile_stored
#define _tile_stored soft_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps soft_dpbf16ps

static _Thread_local struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} soft_config;
static _Thread_local uint32_t soft_tiles[8][16][16];

static void soft_require(int holds) {
    if (!holds) abort();
}

static void soft_loadconfig(const void* config) {
    memcpy(&soft_config, config, sizeof soft_config);
    memset(soft_tiles, 0, sizeof soft_tiles);
    for (int tile = 0; tile < 8; tile++) soft_require(soft_config.rows[tile] <= 16 && soft_config.bytes[tile] <= 64);
}

static void soft_release(void) { memset(&soft_config, 0, sizeof soft_config); }

static void soft_zero(int tile) {
    soft_require(soft_config.palette == 1);
    memset(soft_tiles[tile], 0, sizeof soft_tiles[tile]);
}

static void soft_loadd(int tile, const void* from, long stride) {
    soft_zero(tile);
    for (int row = 0; row < soft_config.rows[tile]; row++)
        memcpy(soft_tiles[tile][row], (const char*)from + row * stride, soft_config.bytes[tile]);
}

static void soft_stored(int tile, void* to, long stride) {
    soft_require(soft_config.palette == 1);
    for (int row = 0; row < soft_config.rows[tile]; row++)
        memcpy((char*)to + row * stride, soft_tiles[tile][row], soft_config.bytes[tile]);
}

static float soft_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void soft_dpbf16ps(int sums, int a, int b) {
    soft_require(soft_config.rows[sums] == soft_config.rows[a] && soft_config.bytes[sums] == soft_config.bytes[b] &&
                 soft_config.bytes[a] == 4 * soft_config.rows[b]);
    for (int row = 0; row < soft_config.rows[a]; row++)
        for (int pair = 0; pair < soft_config.bytes[a] / 4; pair++)
            for (int column = 0; column < soft_config.bytes[b] / 4; column++) {
                uint32_t left = soft_tiles[a][row][pair], right = soft_tiles[b][pair][column];
                float sum = soft_float(soft_tiles[sums][row][column]);
                sum += soft_float(left & 0xffff0000) * soft_float(right & 0xffff0000);
                sum += soft_float(left << 16) * soft_float(right << 16);
                memcpy(&soft_tiles[sums][row][column], &sum, 4);
            }
}
