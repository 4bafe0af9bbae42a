/* L4, each rank: attention on a CPU, over keys and values where the pool has them.
 *
 * Shapes: H query heads, G key/value heads, Q = H / G, C head_dim (a multiple of 16), T slots, P positions. Softmax is
 * computed piece by piece (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"): beside a weighted
 * sum of values the largest score and the sum of the weights relative to it are kept.
 */

#include <stdatomic.h>

#include "cpu.h"

INLINE __m256 load_cached(int half, const char *at, long i)
{
    return half ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)at + i)))
                : _mm256_loadu_ps((const float *)at + i);
}

/* ---- rows that decode one token -------------------------------------------------------------------------------------
 *
 * A task is one key/value head of CHUNK positions of a row. It leaves a part for each of its Q query heads; then the
 * parts of a row are put together.
 */

enum { CHUNK = 256 }; /* positions of a task */
enum { AHEAD = 8 };   /* positions between asking for a key or value and using it: slots lie anywhere in memory */
enum { HEADS = 4 };   /* query heads that share one read of a key */
enum { MERGED = 8 };  /* rows whose parts are put together by one thread: for fewer others are not worth waking */

INLINE void heads_of_chunk(int half, int heads, const float *q, long size, const char **keys, const char **values,
                           long count, float *part)
{
    float weights[HEADS][CHUNK];
    __m256 scale = _mm256_set1_ps(1.0f / sqrtf((float)size));
    for (long p = 0; p < count; p++) {
        if (p + AHEAD < count)
            for (long c = 0; c < size * (half ? 2 : 4); c += 64) {
                _mm_prefetch(keys[p + AHEAD] + c, _MM_HINT_T0);
                _mm_prefetch(values[p + AHEAD] + c, _MM_HINT_T1);
            }
        __m256 dot[HEADS];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) dot[h] = _mm256_setzero_ps();
        for (long c = 0; c < size; c += 8) {
            __m256 key = load_cached(half, keys[p], c);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) dot[h] = _mm256_fmadd_ps(key, _mm256_loadu_ps(q + h * size + c), dot[h]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) weights[h][p] = sum8(_mm256_mul_ps(dot[h], scale));
    }
    long padded = (count + 7) / 8 * 8;
    for (int h = 0; h < heads; h++) {
        for (long p = count; p < padded; p++) weights[h][p] = -INFINITY;
        __m256 most = _mm256_loadu_ps(weights[h]), sum = _mm256_setzero_ps();
        for (long p = 8; p < padded; p += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(weights[h] + p));
        float best = max8(most);
        for (long p = 0; p < padded; p += 8) {
            __m256 weight = exp8(_mm256_sub_ps(_mm256_loadu_ps(weights[h] + p), _mm256_set1_ps(best)));
            _mm256_storeu_ps(weights[h] + p, weight);
        }
        for (long p = count; p < padded; p++) weights[h][p] = 0.0f;
        for (long p = 0; p < padded; p += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(weights[h] + p));
        part[h * (size + 2)] = best;
        part[h * (size + 2) + 1] = sum8(sum);
    }
    for (long c = 0; c < size; c += 16) {
        __m256 sum[HEADS][2];
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) sum[h][0] = sum[h][1] = _mm256_setzero_ps();
        for (long p = 0; p < count; p++) {
            __m256 low = load_cached(half, values[p], c), high = load_cached(half, values[p], c + 8);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                __m256 weight = _mm256_broadcast_ss(&weights[h][p]);
                sum[h][0] = _mm256_fmadd_ps(weight, low, sum[h][0]);
                sum[h][1] = _mm256_fmadd_ps(weight, high, sum[h][1]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++) {
            _mm256_storeu_ps(part + h * (size + 2) + 2 + c, sum[h][0]);
            _mm256_storeu_ps(part + h * (size + 2) + 10 + c, sum[h][1]);
        }
    }
}

INLINE void chunk_of_head(int half, const Attention *a, long row, long kv_head, long begin, float *part)
{
    const char *keys[CHUNK], *values[CHUNK];
    long bytes = half ? 2 : 4, token = 2 * a->num_kv_heads * a->head_dim * bytes, shared = a->num_heads / a->num_kv_heads;
    long count = MIN(CHUNK, a->lengths[row] - begin);
    const int32_t *slots = a->slots + a->rows[row] * a->slots_stride + begin;
    for (long p = 0; p < count; p++) {
        keys[p] = (const char *)a->cache + slots[p] * token + kv_head * a->head_dim * bytes;
        values[p] = keys[p] + token / 2;
    }
    const float *q = a->q + row * a->q_stride + kv_head * shared * a->head_dim;
    for (long h = 0; h < shared; h += HEADS) {
        const float *own = q + h * a->head_dim;
        float *to = part + h * (a->head_dim + 2);
        switch (MIN(HEADS, shared - h)) {
        case 1: heads_of_chunk(half, 1, own, a->head_dim, keys, values, count, to); break;
        case 2: heads_of_chunk(half, 2, own, a->head_dim, keys, values, count, to); break;
        case 3: heads_of_chunk(half, 3, own, a->head_dim, keys, values, count, to); break;
        default: heads_of_chunk(half, 4, own, a->head_dim, keys, values, count, to);
        }
    }
}

typedef struct {
    const Attention *a;
    long *first;  /* of each row, its first chunk among all rows' */
    long *row_of; /* of each chunk */
    float *parts;
} Parts;

static void chunks_of(const void *argument, long begin, long end)
{
    const Parts *p = argument;
    const Attention *a = p->a;
    long kv_heads = a->num_kv_heads, shared = a->num_heads / kv_heads;
    for (long task = begin; task < end; task++) {
        long chunk = task / kv_heads, row = p->row_of[chunk], position = (chunk - p->first[row]) * CHUNK;
        float *part = p->parts + task * shared * (a->head_dim + 2);
        if (a->half)
            chunk_of_head(1, a, row, task % kv_heads, position, part);
        else
            chunk_of_head(0, a, row, task % kv_heads, position, part);
    }
}

/* The parts of a row and head become one. */
static void merge(const Parts *p, long row, long head)
{
    const Attention *a = p->a;
    long shared = a->num_heads / a->num_kv_heads, width = a->head_dim + 2, chunks = p->first[row + 1] - p->first[row];
    const float *part = p->parts + ((p->first[row] * a->num_kv_heads + head / shared) * shared + head % shared) * width;
    long step = a->num_kv_heads * shared * width;
    float *out = a->out + (row * a->num_heads + head) * a->head_dim, most = part[0], sum = 0.0f;
    for (long i = 1; i < chunks; i++) most = fmaxf(most, part[i * step]);
    memset(out, 0, (size_t)a->head_dim * sizeof(float));
    for (long i = 0; i < chunks; i++) {
        const float *own = part + i * step;
        float weight = expf(own[0] - most);
        sum += weight * own[1];
        for (long c = 0; c < a->head_dim; c++) out[c] += weight * own[2 + c];
    }
    for (long c = 0; c < a->head_dim; c++) out[c] /= sum;
}

static void merge_rows(const void *argument, long begin, long end)
{
    const Parts *p = argument;
    for (long row = begin; row < end; row++)
        for (long head = 0; head < p->a->num_heads; head++) merge(p, row, head);
}

int decode(const Attention *a)
{
    long chunks = 0;
    for (long r = 0; r < a->num_rows; r++) chunks += (a->lengths[r] + CHUNK - 1) / CHUNK;
    Parts p = {.a = a,
               .first = malloc((size_t)(a->num_rows + 1) * sizeof(long)),
               .row_of = malloc((size_t)chunks * sizeof(long)),
               .parts = malloc((size_t)(chunks * a->num_heads * (a->head_dim + 2)) * sizeof(float))};
    int failed = !p.first || !p.row_of || !p.parts;
    if (!failed) {
        p.first[0] = 0;
        for (long r = 0; r < a->num_rows; r++) {
            p.first[r + 1] = p.first[r] + (a->lengths[r] + CHUNK - 1) / CHUNK;
            for (long i = p.first[r]; i < p.first[r + 1]; i++) p.row_of[i] = r;
        }
        share_out(chunks_of, &p, chunks * a->num_kv_heads, 1);
        share_out(merge_rows, &p, a->num_rows, MERGED);
    }
    free(p.first), free(p.row_of), free(p.parts);
    return -failed;
}

/* ---- prompt chunks --------------------------------------------------------------------------------------------------
 *
 * The queries of a chunk, of all query heads that share a key/value head, are cut into panels. A block of keys and
 * values is brought to float32 once for several panels; then a panel's scores, [keys, queries], and what it adds to its
 * sums, [queries, C], are products of small matrices that stay in registers.
 */

enum { QUERIES = 24 }; /* of a panel: with 4 keys they have 12 sums, which with 3 queries and a key fill the registers */
enum { KEYS = 4 };
enum { ROWS = 6 }; /* queries whose sums of 16 channels are in registers: 12 sums, 2 values and a weight */
enum { LANES = 16 };
enum { BLOCK = 128 }; /* keys at a time */
enum { PANELS = 12 }; /* at most that share a block, so that all of it stays in L2 */

typedef struct {
    _Alignas(32) float most[QUERIES];
    _Alignas(32) float sum[QUERIES];
    int32_t sees[QUERIES]; /* positions up to each query's own */
    long end;              /* the most of these */
    float *q;              /* [C, QUERIES], scaled so that weights are powers of 2 */
    float *out;            /* [QUERIES, C] */
} Panel;

typedef struct {
    float *keys;   /* [BLOCK, C] */
    float *values; /* [C / 16, BLOCK, 16] */
    float *scores; /* [BLOCK, QUERIES] */
    Panel panels[PANELS];
} Room;

/* 2^x for x <= 0, with a relative error of 2e-7: e^(r ln 2) by Taylor's series, |r| <= 1/2. */
INLINE __m256 power8(__m256 x)
{
    x = _mm256_max_ps(x, _mm256_set1_ps(-126.0f));
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT), r = _mm256_sub_ps(x, n);
    __m256 e = _mm256_set1_ps(1.54035304e-4f);
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.33335581e-3f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(9.61812911e-3f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(5.55041087e-2f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(2.40226507e-1f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(6.93147181e-1f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(e), power));
}

static void load_block(const Attention *a, long row, long kv_head, long begin, long count, Room *room)
{
    long size = a->head_dim, bytes = a->half ? 2 : 4, token = 2 * a->num_kv_heads * size * bytes;
    const int32_t *slots = a->slots + a->rows[row] * a->slots_stride + begin;
    for (long p = 0; p < count; p++) {
        const char *key = (const char *)a->cache + slots[p] * token + kv_head * size * bytes, *value = key + token / 2;
        if (p + AHEAD < count) {
            const char *next = (const char *)a->cache + slots[p + AHEAD] * token + kv_head * size * bytes;
            for (long c = 0; c < size * bytes; c += 64) {
                _mm_prefetch(next + c, _MM_HINT_T0);
                _mm_prefetch(next + token / 2 + c, _MM_HINT_T0);
            }
        }
        for (long c = 0; c < size; c += 8) {
            float *to = room->values + (c / LANES * BLOCK + p) * LANES + c % LANES;
            _mm256_store_ps(room->keys + p * size + c, load_cached(a->half, key, c));
            _mm256_store_ps(to, load_cached(a->half, value, c));
        }
    }
    for (long p = count; p % KEYS; p++)
        for (long c = 0; c < size; c += 8) {
            _mm256_store_ps(room->keys + p * size + c, _mm256_setzero_ps());
            _mm256_store_ps(room->values + (c / LANES * BLOCK + p) * LANES + c % LANES, _mm256_setzero_ps());
        }
}

INLINE void score_keys(const float *keys, const float *q, long size, float *scores)
{
    __m256 sum[KEYS][3];
#pragma GCC unroll 4
    for (int k = 0; k < KEYS; k++) sum[k][0] = sum[k][1] = sum[k][2] = _mm256_setzero_ps();
#pragma GCC unroll 2
    for (long c = 0; c < size; c++) {
        const float *at = q + c * QUERIES;
        __m256 query[3] = {_mm256_load_ps(at), _mm256_load_ps(at + 8), _mm256_load_ps(at + 16)};
#pragma GCC unroll 4
        for (int k = 0; k < KEYS; k++) {
            __m256 key = _mm256_broadcast_ss(keys + k * size + c);
#pragma GCC unroll 3
            for (int u = 0; u < 3; u++) sum[k][u] = _mm256_fmadd_ps(key, query[u], sum[k][u]);
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < KEYS; k++)
#pragma GCC unroll 3
        for (int u = 0; u < 3; u++) _mm256_store_ps(scores + k * QUERIES + 8 * u, sum[k][u]);
}

/* Of ROWS queries and 16 channels. `out` is what was there, times `keep`, and the weighted values. */
INLINE void add_values(const float *weights, const float *keep, const float *values, long count, float *out, long size)
{
    __m256 sum[ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        __m256 factor = _mm256_broadcast_ss(keep + r);
        sum[r][0] = _mm256_mul_ps(factor, _mm256_load_ps(out + r * size));
        sum[r][1] = _mm256_mul_ps(factor, _mm256_load_ps(out + r * size + 8));
    }
#pragma GCC unroll 2
    for (long p = 0; p < count; p++) {
        __m256 low = _mm256_load_ps(values + p * LANES), high = _mm256_load_ps(values + p * LANES + 8);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            __m256 weight = _mm256_broadcast_ss(weights + p * QUERIES + r);
            sum[r][0] = _mm256_fmadd_ps(weight, low, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(weight, high, sum[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        _mm256_store_ps(out + r * size, sum[r][0]);
        _mm256_store_ps(out + r * size + 8, sum[r][1]);
    }
}

/* The panel sees the block's first `count` keys, which stand at positions from `begin` on. */
static void attend(Panel *panel, const Room *room, long size, long begin, long count)
{
    long padded = (count + KEYS - 1) / KEYS * KEYS;
    float *scores = room->scores, keep[QUERIES] __attribute__((aligned(32)));
    for (long p = 0; p < padded; p += KEYS) score_keys(room->keys + p * size, panel->q, size, scores + p * QUERIES);
    for (long p = panel->sees[0] - begin < 0 ? 0 : panel->sees[0] - begin; p < padded; p++)
        for (int r = 0; r < QUERIES; r++)
            if (begin + p >= panel->sees[r]) scores[p * QUERIES + r] = -INFINITY;
    for (int r = 0; r < QUERIES; r += 8) {
        __m256 before = _mm256_load_ps(panel->most + r), most = before;
        for (long p = 0; p < padded; p++) most = _mm256_max_ps(most, _mm256_load_ps(scores + p * QUERIES + r));
        __m256 factor = power8(_mm256_sub_ps(before, most)), sum = _mm256_mul_ps(factor, _mm256_load_ps(panel->sum + r));
        for (long p = 0; p < padded; p++) {
            __m256 weight = power8(_mm256_sub_ps(_mm256_load_ps(scores + p * QUERIES + r), most));
            _mm256_store_ps(scores + p * QUERIES + r, weight);
            sum = _mm256_add_ps(sum, weight);
        }
        _mm256_store_ps(panel->most + r, most);
        _mm256_store_ps(panel->sum + r, sum);
        _mm256_store_ps(keep + r, factor);
    }
    for (long c = 0; c < size; c += LANES)
        for (int r = 0; r < QUERIES; r += ROWS)
            add_values(scores + r, keep + r, room->values + c * BLOCK, padded, panel->out + r * size + c, size);
}

/* `count` panels from the row's and head's `first` on. `token` is the first of the chunk's tokens. */
static void attend_panels(const Attention *a, long row, long token, long tokens, long kv_head, long first, long count,
                          Room *room)
{
    long size = a->head_dim, shared = a->num_heads / a->num_kv_heads, start = a->lengths[row] - tokens, end = 0;
    float scale = 1.44269504f / sqrtf((float)size); /* 1 / ln(2): e^x = 2^(x / ln(2)) */
    for (long i = 0; i < count; i++) {
        Panel *panel = &room->panels[i];
        memset(panel->sum, 0, sizeof panel->sum);
        memset(panel->out, 0, (size_t)(QUERIES * size) * sizeof(float));
        for (long r = 0; r < QUERIES; r++) {
            /* Behind the last query it stands again: what comes of it is not written. */
            long query = MIN((first + i) * QUERIES + r, tokens * shared - 1), own = query / shared;
            const float *from = a->q + (token + own) * a->q_stride + (kv_head * shared + query % shared) * size;
            for (long c = 0; c < size; c++) panel->q[c * QUERIES + r] = from[c] * scale;
            panel->most[r] = -INFINITY;
            panel->sees[r] = (int32_t)(start + own + 1);
        }
        end = panel->end = panel->sees[QUERIES - 1];
    }
    for (long begin = 0; begin < end; begin += BLOCK) {
        load_block(a, row, kv_head, begin, MIN(BLOCK, end - begin), room);
        for (long i = 0; i < count; i++) {
            long seen = MIN(BLOCK, room->panels[i].end - begin);
            if (seen > 0) attend(&room->panels[i], room, size, begin, seen);
        }
    }
    for (long i = 0; i < count; i++)
        for (long r = 0; r < MIN(QUERIES, tokens * shared - (first + i) * QUERIES); r++) {
            long query = (first + i) * QUERIES + r, head = kv_head * shared + query % shared;
            float *to = a->out + ((token + query / shared) * a->num_heads + head) * size;
            __m256 share = _mm256_set1_ps(1.0f / room->panels[i].sum[r]);
            for (long c = 0; c < size; c += 8) {
                __m256 sum = _mm256_load_ps(room->panels[i].out + r * size + c);
                _mm256_storeu_ps(to + c, _mm256_mul_ps(share, sum));
            }
        }
}

static long panels_of_head(const Attention *a, long tokens)
{
    return (tokens * (a->num_heads / a->num_kv_heads) + QUERIES - 1) / QUERIES;
}

/* The thread's own, kept from one call to the next. False if there is no memory for it. */
static int take_room(Room *room, long size)
{
    static _Thread_local float *memory = NULL;
    static _Thread_local size_t held = 0;
    size_t needed = (size_t)(BLOCK * (2 * size + QUERIES) + PANELS * 2 * QUERIES * size);
    if (held < needed) {
        free(memory);
        memory = aligned_alloc(64, needed * sizeof(float));
        held = memory ? needed : 0;
    }
    room->keys = memory;
    if (!memory) return 0;
    room->values = room->keys + BLOCK * size;
    room->scores = room->values + BLOCK * size;
    float *next = room->scores + BLOCK * QUERIES;
    for (int i = 0; i < PANELS; i++, next += 2 * QUERIES * size) {
        room->panels[i].q = next;
        room->panels[i].out = next + QUERIES * size;
    }
    return 1;
}

typedef struct {
    const Attention *a;
    const int64_t *counts;
    long panels; /* of all rows and heads, which stand in one line, row by row and head by head */
    atomic_int *failed;
} Chunks;

/* From the end of the line on: a row's last panels see most, and are to be begun first. */
static void panels_of(const void *argument, long begin, long end)
{
    const Chunks *chunks = argument;
    const Attention *a = chunks->a;
    long first = chunks->panels - end, last = chunks->panels - begin;
    Room room;
    if (!take_room(&room, a->head_dim)) {
        *chunks->failed = 1;
        return;
    }
    for (long row = 0, token = 0, before = 0; row < a->num_rows && before < last; token += chunks->counts[row++]) {
        long panels = panels_of_head(a, chunks->counts[row]);
        for (long head = 0; head < a->num_kv_heads; head++, before += panels)
            for (long at = MAX(first, before); at < MIN(last, before + panels); at += PANELS) {
                long count = MIN(PANELS, MIN(last, before + panels) - at);
                attend_panels(a, row, token, chunks->counts[row], head, at - before, count, &room);
            }
    }
}

int prefill(const Attention *a, const int64_t *counts)
{
    atomic_int failed = 0;
    Chunks chunks = {.a = a, .counts = counts, .failed = &failed};
    for (long r = 0; r < a->num_rows; r++) chunks.panels += panels_of_head(a, counts[r]) * a->num_kv_heads;
    share_out(panels_of, &chunks, chunks.panels, 1);
    return -failed;
}
