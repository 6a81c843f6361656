/* The formats of numbers by their index, and the loops that convert narrow floats (formats.h).
 *
 * The loops are branch-free and generic: a format is a few constants, which the compiler folds
 * into a separate vectorised loop for each format. (GCC vectorises these loops only with
 * -fno-trapping-math: otherwise it must preserve floating point's exception flags.) */

#include "formats.h"
#include "kernels.h"

#include <stdint.h>
#include <string.h>
#ifdef DISPATCH
#include <immintrin.h>
#endif

/* ---- Loops ----------------------------------------------------------------------------------- */

/* Arrays of callers: elements may be unaligned. */
typedef uint8_t __attribute__((may_alias)) word8;
typedef uint16_t __attribute__((may_alias, aligned(1))) word16;
typedef float __attribute__((may_alias, aligned(1))) word32;

typedef void widen_loop(const void *source, word32 *out, size_t count);
typedef void narrow_loop(const word32 *source, void *out, size_t count);
/* out = (left + right) / divisor, all in registers; out may be either operand. */
typedef void add_loop(const void *left, const void *right, void *out, float divisor, size_t count);

#define LOOPS(NAME, WIDTH, ...)                                                                    \
    VECTORISED static void widen_loop_##NAME(const void *source, word32 *out, size_t count)        \
    {                                                                                              \
        const word##WIDTH *restrict from = source;                                                 \
        word32 *restrict to = out;                                                                 \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = widen_##NAME(from[i]);                                                         \
    }                                                                                              \
    VECTORISED static void narrow_loop_##NAME(const word32 *source, void *out, size_t count)       \
    {                                                                                              \
        const word32 *restrict from = source;                                                      \
        word##WIDTH *restrict to = out;                                                            \
        for (size_t i = 0; i < count; i++)                                                         \
            to[i] = (word##WIDTH)narrow_##NAME(from[i]);                                           \
    }                                                                                              \
    VECTORISED static void add_loop_##NAME(const void *left, const void *right, void *out,         \
                                           float divisor, size_t count)                            \
    {                                                                                              \
        const word##WIDTH *a = left, *b = right;                                                   \
        word##WIDTH *to = out;                                                                     \
        if (divisor == 1) {                                                                        \
            INDEPENDENT for (size_t i = 0; i < count; i++) to[i] =                                 \
                (word##WIDTH)narrow_##NAME(widen_##NAME(a[i]) + widen_##NAME(b[i]));               \
        } else {                                                                                   \
            INDEPENDENT for (size_t i = 0; i < count; i++) to[i] =                                 \
                (word##WIDTH)narrow_##NAME((widen_##NAME(a[i]) + widen_##NAME(b[i])) / divisor);   \
        }                                                                                          \
    }
FORMATS(LOOPS)

#define ROW(NAME, WIDTH, ...)                                                                      \
    {#NAME, WIDTH / 8, widen_loop_##NAME, narrow_loop_##NAME, add_loop_##NAME},
static struct {
    const char *name;
    size_t size;
    widen_loop *widen;
    narrow_loop *narrow;
    add_loop *add;
} narrow_formats[NARROW_COUNT] = {FORMATS(ROW)};

/* x86-64 has float16 instructions, but compilers do not use them for the loops above. */
#ifdef DISPATCH
#define F16C __attribute__((target("avx2,f16c")))

F16C static void widen_f16c(const void *source, word32 *out, size_t count)
{
    const word16 *from = source;
    for (; count >= 8; count -= 8, from += 8, out += 8)
        _mm256_storeu_ps((float *)out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)));
    widen_loop_float16(from, out, count);
}

F16C static void narrow_f16c(const word32 *source, void *out, size_t count)
{
    const __m256 nan = _mm256_set1_ps(float_of(QUIET_NAN));
    word16 *to = out;
    for (; count >= 8; count -= 8, source += 8, to += 8) {
        const __m256 values = _mm256_loadu_ps((const float *)source);
        const __m256 is_nan = _mm256_cmp_ps(values, values, _CMP_UNORD_Q);
        const __m256 signless = _mm256_blendv_ps(values, nan, is_nan);
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(signless, _MM_FROUND_TO_NEAREST_INT));
    }
    narrow_loop_float16(source, to, count);
}

F16C static void add_f16c(const void *left, const void *right, void *out, float divisor,
                          size_t count)
{
    const __m256 nan = _mm256_set1_ps(float_of(QUIET_NAN)), divisors = _mm256_set1_ps(divisor);
    const word16 *a = left, *b = right;
    word16 *to = out;
    for (; count >= 8; count -= 8, a += 8, b += 8, to += 8) {
        __m256 sum = _mm256_add_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)a)),
                                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)b)));
        if (divisor != 1)
            sum = _mm256_div_ps(sum, divisors);
        sum = _mm256_blendv_ps(sum, nan, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    }
    add_loop_float16(a, b, to, divisor, count);
}

/* Compilers halve the vectors of the bfloat16 loop, unless a flag for the whole file is set. */
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))

AVX512 static __m512i rounded_to_bfloat16(__m512 sum)
{
    const __m512i bits = _mm512_castps_si512(sum), quiet = _mm512_set1_epi32(QUIET_NAN >> 16);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q), quiet);
}

/* Processes two elements in 32 bits: the upper half is a float32 once the lower half is cleared,
 * and the lower half once it is shifted up. */
AVX512 static void add_bfloat16_avx512(const void *left, const void *right, void *out,
                                       float divisor, size_t count)
{
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512 divisors = _mm512_set1_ps(divisor);
    const word16 *a = left, *b = right;
    word16 *to = out;
    for (; count >= 32; count -= 32, a += 32, b += 32, to += 32) {
        const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
        __m512 high = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                                    _mm512_castsi512_ps(_mm512_and_si512(y, upper)));
        __m512 low = _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)));
        if (divisor != 1) {
            high = _mm512_div_ps(high, divisors);
            low = _mm512_div_ps(low, divisors);
        }
        _mm512_storeu_si512(to,
                            _mm512_or_si512(_mm512_slli_epi32(rounded_to_bfloat16(high), 16),
                                            rounded_to_bfloat16(low)));
    }
    add_loop_bfloat16(a, b, to, divisor, count);
}

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) /* implies F16C, which older compilers cannot query */
        return;
    narrow_formats[INDEX_float16].widen = widen_f16c;
    narrow_formats[INDEX_float16].narrow = narrow_f16c;
    narrow_formats[INDEX_float16].add = add_f16c;
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        narrow_formats[INDEX_bfloat16].add = add_bfloat16_avx512;
}
#endif

#define WIDE_ROW(NAME, TYPE, ...) {#NAME, sizeof(TYPE)},
static const struct {
    const char *name;
    size_t size;
} wide_formats[FORMAT_COUNT - NARROW_COUNT] = {WIDE_FORMATS(WIDE_ROW)};

/* ---- Functions for Python and other files ---------------------------------------------------- */

/* Returns the index by which the functions below identify a format, or -1. */
EXPORT int mpicoll_format(const char *name)
{
    for (int i = 0; i < NARROW_COUNT; i++)
        if (!strcmp(narrow_formats[i].name, name))
            return i;
    for (int i = NARROW_COUNT; i < FORMAT_COUNT; i++)
        if (!strcmp(wide_formats[i - NARROW_COUNT].name, name))
            return i;
    return -1;
}

/* Returns the size of an element in bytes. */
EXPORT size_t mpicoll_size(int format)
{
    return format < NARROW_COUNT ? narrow_formats[format].size
                                 : wide_formats[format - NARROW_COUNT].size;
}

/* Converts a narrow float to float32: out = source. The arrays do not overlap. */
EXPORT void mpicoll_widen(int format, const void *source, void *out, size_t count)
{
    narrow_formats[format].widen(source, out, count);
}

/* Rounds float32 to a narrow float: out = source. The arrays do not overlap. */
EXPORT void mpicoll_narrow(int format, const void *source, void *out, size_t count)
{
    narrow_formats[format].narrow(source, out, count);
}

/* out = (left + right) / divisor, of a narrow float; out may be either operand. */
void mpicoll_add_narrow(int format, const void *left, const void *right, void *out, double divisor,
                        size_t count)
{
    narrow_formats[format].add(left, right, out, (float)divisor, count);
}
