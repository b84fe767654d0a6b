// The products of AVX512_BF16 in plain C, so that the kernels' code for it can be tested on any CPU with AVX-512:
//
//     gcc -march=skylake-avx512 -include bf16_in_software.h ... cpu_kernels.c

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AVX512BF16__ 1
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps soft_dpbf16_ps
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh soft_cvtneps_pbh

static float soft_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static __m512 soft_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    float sum[16];
    uint32_t left[16], right[16];
    memcpy(sum, &sums, sizeof sum);
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    for (int i = 0; i < 16; i++) {
        sum[i] += soft_float(left[i] & 0xffff0000) * soft_float(right[i] & 0xffff0000);
        sum[i] += soft_float(left[i] << 16) * soft_float(right[i] << 16);
    }
    memcpy(&sums, sum, sizeof sum);
    return sums;
}

// Round to the nearest, ties to even.
static __m256i soft_cvtneps_pbh(__m512 values) {
    uint32_t bits[16];
    uint16_t rounded[16];
    memcpy(bits, &values, sizeof bits);
    for (int i = 0; i < 16; i++)
        rounded[i] = values[i] != values[i] ? 0x7fc0 : (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    return _mm256_loadu_si256((void*)rounded);
}
