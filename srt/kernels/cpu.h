/* L4, each rank: what the files of the CPU's kernels have in common. */

#ifndef LOCKSTEP_CPU_H
#define LOCKSTEP_CPU_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Changes with what a function takes and with how memory is laid out. srt/kernels/cpu.py has the number, too, and uses
 * no module that was compiled with another. */
#define INTERFACE 3

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

INLINE float sum8(__m256 x)
{
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

INLINE float max8(__m256 x)
{
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/* e^x = 2^n e^r with |r| <= ln(2) / 2, e^r by Taylor's series: a relative error of 2e-7. */
INLINE __m256 exp8(__m256 x)
{
    x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.0f)), _mm256_set1_ps(88.0f));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x); /* ln(2) in two parts: n times this one is exact */
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 e = _mm256_set1_ps(1.0f / 720);
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 120));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 24));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 6));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(0.5f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), power));
}

/* Does the items from `begin` on, up to `end`. */
typedef void (*Work)(const void *argument, long begin, long end);

/* All items, in pieces of at least `least` that threads claim, the first pieces first; returns when they are done. */
void share_out(Work work, const void *argument, long items, long least);

/* Rows of the batch that attend to what is stored of them. */
typedef struct {
    int half; /* the cache is float16, else float32 */
    const float *q;
    float *out;
    const void *cache;      /* [T, 2 G, C] of one layer */
    const int32_t *slots;   /* the slot table [.., P] */
    const int64_t *rows;    /* of the slot table, for each row of the batch */
    const int64_t *lengths; /* positions up to each row's last token */
    long q_stride, slots_stride, num_rows, num_heads, num_kv_heads, head_dim;
} Attention;

/* One token of each row. -1 if there is no memory for what is kept beside. */
int decode(const Attention *a);

/* The last `counts` tokens of each row. Likewise. */
int prefill(const Attention *a, const int64_t *counts);

#endif
