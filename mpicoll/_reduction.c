/* Reductions of numbers: of integers and of float32 and float64 as they are, and of the floats that
 * are too narrow to accumulate in, bfloat16, float16 and float8_* (but for float8_e8m0fnu, which is a
 * scale rather than a number), in float32.
 *
 * Narrow floats are rounded once, to nearest even, block by block: a block of every source is
 * widened, folded into an accumulator that stays in the first-level cache, and narrowed into the
 * result. A block of the result is written after the same block of all sources was read, so the
 * result may be the memory of any one of them.
 *
 * The loops are branch-free and dtype-generic: a format is a handful of constants, and the compiler
 * folds them into a loop of its own for each format, and vectorises it. (It may only if it need not
 * keep floating point's exception flags: GCC wants -fno-trapping-math for that.)
 *
 * Which bits a NaN has is settled here, because hardware does not: of two NaN operands one or the
 * other passes its sign and payload on, as the compiler happened to order them, and inf - inf is
 * negative on some processors. Every NaN becomes the NaN without sign that NumPy and ml_dtypes make
 * from float32's nan. (A finite value that overflows into NaN, in formats that have no infinity,
 * keeps its sign, as there.) All other results are those of NumPy and ml_dtypes bit for bit, which
 * forbids -ffast-math.
 *
 * This is plain C for ctypes: it does not include Python.h and defines no module.
 */

#include "_kernels.h"

#include <stdint.h>
#include <string.h>

/* One library for several vector units: glibc picks the version of a function when it loads it.
 * Of AVX-512, elements of 16 bits need BW and VL as well, hence whole levels of the architecture
 * where the compiler knows them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCH 1
#include <immintrin.h>
#if __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define VECTORISED
#endif

#define INLINE static inline __attribute__((always_inline))

/* Elements of a block: two blocks of float32 leave most of a first-level cache to the sources. */
enum { BLOCK = 1024 };

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#define SIGN 0x80000000u
#define INFINITE 0x7f800000u /* greater magnitudes are NaN */
#define QUIET_NAN 0x7fc00000u

/* ---- Formats ---------------------------------------------------------------------------------
 *
 * All formats by name, with the bits of an element, and for the regular ones, which have a sign,
 * an exponent and a mantissa, the family, the mantissa's bits and the exponent's bias:
 *
 * IEEE: the greatest exponent means infinity and NaN.
 * FN:   finite but for the one NaN whose bits are all ones; no infinity.
 * FNUZ: the same, and zero has no sign: its negative is the NaN.
 */
enum family { IEEE, FN, FNUZ };

#define REGULAR_FORMATS(X)                                                                         \
    X(float16, 16, IEEE, 10, 15)                                                                   \
    X(float8_e3m4, 8, IEEE, 4, 3)                                                                  \
    X(float8_e4m3, 8, IEEE, 3, 7)                                                                  \
    X(float8_e4m3b11fnuz, 8, FNUZ, 3, 11)                                                          \
    X(float8_e4m3fn, 8, FN, 3, 7)                                                                  \
    X(float8_e4m3fnuz, 8, FNUZ, 3, 8)                                                              \
    X(float8_e5m2, 8, IEEE, 2, 15)                                                                 \
    X(float8_e5m2fnuz, 8, FNUZ, 2, 16)

#define FORMATS(X)                                                                                 \
    X(bfloat16, 16)                                                                                \
    REGULAR_FORMATS(X)

INLINE float widen_regular(uint32_t bits, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t least_normal = 1u << mantissa;
    const uint32_t infinite = sign - least_normal;
    const uint32_t magnitude = bits & (sign - 1);

    const uint32_t normal = (magnitude << shift) + rebias;
    /* A subnormal has no implicit one: lend it one, and take it back. */
    const uint32_t subnormal = bits_of(float_of(normal + one) - float_of(rebias + one));
    uint32_t wide = magnitude < least_normal ? subnormal : normal;
    wide |= (bits & sign) << (32 - width);
    switch (family) {
    case IEEE:
        return float_of(magnitude >= infinite ? wide | INFINITE : wide);
    case FN:
        return float_of(magnitude == sign - 1 ? QUIET_NAN : wide);
    default:
        return float_of(bits == sign ? QUIET_NAN : wide);
    }
}

INLINE uint32_t narrow_regular(float value, int width, enum family family, int mantissa, int bias)
{
    const int shift = 23 - mantissa;
    const uint32_t rebias = (uint32_t)(127 - bias) << 23;
    const uint32_t one = 1u << 23;
    const uint32_t sign = 1u << (width - 1);
    const uint32_t infinite = sign - (1u << mantissa);
    const uint32_t quiet = infinite | 1u << (mantissa - 1);
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & ~SIGN;
    const uint32_t signs = bits >> (32 - width) & sign;
    const int nan = magnitude > INFINITE;

    /* Add half an ulp, or a little less where a tie must fall to an even number; then truncate. */
    const uint32_t half = (1u << (shift - 1)) - 1 + (magnitude >> shift & 1);
    const uint32_t normal = (magnitude - rebias + half) >> shift;
    /* Next to this number float32 is spaced as the subnormals are, and the addition rounds. */
    const uint32_t spacer = rebias + ((uint32_t)(shift + 1) << 23);
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(spacer)) - spacer;
    const uint32_t rounded = magnitude < rebias + one ? subnormal : normal;

    switch (family) {
    case IEEE:
        return nan ? quiet : (rounded < infinite ? rounded : infinite) | signs;
    case FN:
        return nan ? sign - 1 : (rounded < sign - 1 ? rounded : sign - 1) | signs;
    default:
        return nan || rounded >= sign ? sign : rounded ? rounded | signs : 0;
    }
}

#define CONVERTERS(NAME, WIDTH, FAMILY, MANTISSA, BIAS)                                            \
    INLINE float widen_##NAME(uint32_t bits)                                                       \
    {                                                                                              \
        return widen_regular(bits, WIDTH, FAMILY, MANTISSA, BIAS);                                 \
    }                                                                                              \
    INLINE uint32_t narrow_##NAME(float value)                                                     \
    {                                                                                              \
        return narrow_regular(value, WIDTH, FAMILY, MANTISSA, BIAS);                               \
    }
REGULAR_FORMATS(CONVERTERS)

/* bfloat16 is the upper half of a float32. */
INLINE float widen_bfloat16(uint32_t bits)
{
    return float_of(bits << 16);
}

INLINE uint32_t narrow_bfloat16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & ~SIGN) > INFINITE ? QUIET_NAN >> 16 : rounded;
}

/* ---- Loops ----------------------------------------------------------------------------------- */

/* The arrays come from elsewhere: their elements may lie at any address. */
typedef uint8_t __attribute__((may_alias)) word8;
typedef uint16_t __attribute__((may_alias, aligned(1))) word16;
typedef float __attribute__((may_alias, aligned(1))) word32;

/* The result may be exactly one of the operands, which compilers cannot guess. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT
#endif

typedef void widen_loop(const void *source, word32 *out, size_t count);
typedef void narrow_loop(const word32 *source, void *out, size_t count);
/* out = (left + right) / divisor, all in registers; out may be one of them. */
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

#define INDEX(NAME, ...) INDEX_##NAME,
enum { FORMATS(INDEX) COUNT };

#define ROW(NAME, WIDTH, ...)                                                                      \
    {#NAME, WIDTH / 8, widen_loop_##NAME, narrow_loop_##NAME, add_loop_##NAME},
static struct {
    const char *name;
    size_t size;
    widen_loop *widen;
    narrow_loop *narrow;
    add_loop *add;
} formats[COUNT] = {FORMATS(ROW)};

/* x86-64 has instructions for float16, but compilers do not find them in the loop above. */
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

__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2")) /* brings F16C along, for which older compilers cannot ask */
        return;
    formats[INDEX_float16].widen = widen_f16c;
    formats[INDEX_float16].narrow = narrow_f16c;
    formats[INDEX_float16].add = add_f16c;
}
#endif

enum operation { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR };

/* Of equal numbers (0.0 and -0.0) the later is taken, as by NumPy on x86-64; the first NaN stays. */
#define MINIMUM(A, B) ((A) < (B) || (A) != (A) ? (A) : (B))
#define MAXIMUM(A, B) ((A) > (B) || (A) != (A) ? (A) : (B))

#define EACH(EXPRESSION)                                                                           \
    INDEPENDENT for (size_t i = 0; i < count; i++) out[i] = EXPRESSION;                            \
    break

/* Integers wrap around, in a type that arithmetic does not widen; floats have no bits to combine. */
#define INTEGER_CASES(WIDE)                                                                        \
    case SUM:                                                                                      \
        EACH((WIDE)a[i] + (WIDE)b[i]);                                                             \
    case PRODUCT:                                                                                  \
        EACH((WIDE)a[i] * (WIDE)b[i]);                                                             \
    case BAND:                                                                                     \
        EACH(a[i] & b[i]);                                                                         \
    case BOR:                                                                                      \
        EACH(a[i] | b[i]);                                                                         \
    case BXOR:                                                                                     \
        EACH(a[i] ^ b[i]);

#define FLOAT_CASES(WIDE)                                                                          \
    case SUM:                                                                                      \
        EACH(a[i] + b[i]);                                                                         \
    case PRODUCT:                                                                                  \
        EACH(a[i] * b[i]);

/* Any byte but 0 is true, as for NumPy. */
#define BOOL_CASES(WIDE)                                                                           \
    case BAND:                                                                                     \
        EACH((a[i] != 0) & (b[i] != 0));                                                           \
    case BOR:                                                                                      \
        EACH((a[i] != 0) | (b[i] != 0));                                                           \
    case BXOR:                                                                                     \
        EACH((a[i] != 0) ^ (b[i] != 0));

/* The formats that are computed with as they are: the C type, in which type integers wrap around,
 * and what there is to do besides MIN and MAX. */
#define WIDE_FORMATS(X)                                                                            \
    X(float32, float, float, FLOAT_CASES)                                                          \
    X(float64, double, double, FLOAT_CASES)                                                        \
    X(bool, uint8_t, uint32_t, BOOL_CASES)                                                         \
    X(int8, int8_t, uint32_t, INTEGER_CASES)                                                       \
    X(int16, int16_t, uint32_t, INTEGER_CASES)                                                     \
    X(int32, int32_t, uint32_t, INTEGER_CASES)                                                     \
    X(int64, int64_t, uint64_t, INTEGER_CASES)                                                     \
    X(uint8, uint8_t, uint32_t, INTEGER_CASES)                                                     \
    X(uint16, uint16_t, uint32_t, INTEGER_CASES)                                                   \
    X(uint32, uint32_t, uint32_t, INTEGER_CASES)                                                   \
    X(uint64, uint64_t, uint64_t, INTEGER_CASES)

/* fold: out = left op right; out may be one of them. divide: out = out / divisor. */
#define WIDE_LOOPS(NAME, TYPE, WIDE, CASES)                                                        \
    typedef TYPE __attribute__((may_alias, aligned(1))) element_##NAME;                            \
    VECTORISED static void fold_##NAME(int operation, const void *left, const void *right,         \
                                       void *result, size_t count)                                 \
    {                                                                                              \
        const element_##NAME *a = left, *b = right;                                                \
        element_##NAME *out = result;                                                              \
        switch (operation) {                                                                       \
            CASES(WIDE)                                                                            \
        case MIN:                                                                                  \
            EACH(MINIMUM(a[i], b[i]));                                                             \
        case MAX:                                                                                  \
            EACH(MAXIMUM(a[i], b[i]));                                                             \
        }                                                                                          \
    }                                                                                              \
    VECTORISED static void divide_##NAME(void *result, double divisor, size_t count)               \
    {                                                                                              \
        element_##NAME *out = result;                                                              \
        for (size_t i = 0; i < count; i++)                                                         \
            out[i] /= (TYPE)divisor;                                                               \
    }
WIDE_FORMATS(WIDE_LOOPS)

#define WIDE_INDEX(NAME, ...) INDEX_##NAME,
enum { LAST_NARROW = COUNT - 1, WIDE_FORMATS(WIDE_INDEX) END };

#define WIDE_ROW(NAME, TYPE, ...) {#NAME, sizeof(TYPE), fold_##NAME, divide_##NAME},
static const struct {
    const char *name;
    size_t size;
    void (*fold)(int operation, const void *left, const void *right, void *result, size_t count);
    void (*divide)(void *result, double divisor, size_t count);
} wide_formats[END - COUNT] = {WIDE_FORMATS(WIDE_ROW)};

static void combine_narrow(int format, int operation, const char *const *sources, size_t n,
                           char *out, size_t count, double divisor)
{
    const size_t size = formats[format].size;
    _Alignas(64) word32 accumulator[BLOCK], block[BLOCK];

    if (n == 2 && operation == SUM) {
        formats[format].add(sources[0], sources[1], out, divisor, count);
        return;
    }
    for (size_t start = 0; start < count; start += BLOCK) {
        const size_t length = count - start < BLOCK ? count - start : BLOCK;
        formats[format].widen(sources[0] + start * size, accumulator, length);
        for (size_t k = 1; k < n; k++) {
            formats[format].widen(sources[k] + start * size, block, length);
            fold_float32(operation, accumulator, block, accumulator, length);
        }
        if (divisor != 1)
            divide_float32(accumulator, divisor, length);
        formats[format].narrow(accumulator, out + start * size, length);
    }
}

static void combine_wide(int format, int operation, const char *const *sources, size_t n, char *out,
                         size_t count, double divisor)
{
    const size_t size = mpicoll_size(format), step = n > 2 ? sizeof(float[BLOCK]) / size : count;
    _Alignas(64) char accumulator[sizeof(float[BLOCK])];

    for (size_t start = 0; start < count; start += step) {
        const size_t length = count - start < step ? count - start : step, at = start * size;
        const char *left = sources[0] + at;
        if (n == 1 && left != out + at)
            memcpy(out + at, left, length * size);
        for (size_t k = 1; k < n; k++) {
            /* Only the last step may write to the result, as it may be any source. */
            char *result = k == n - 1 ? out + at : accumulator;
            wide_formats[format - COUNT].fold(operation, left, sources[k] + at, result, length);
            left = result;
        }
        if (divisor != 1)
            wide_formats[format - COUNT].divide(out + at, divisor, length);
    }
}

/* ---- What Python calls ----------------------------------------------------------------------- */

/* The number by which the functions below know a format, or -1. */
EXPORT int mpicoll_format(const char *name)
{
    for (int i = 0; i < COUNT; i++)
        if (!strcmp(formats[i].name, name))
            return i;
    for (int i = COUNT; i < END; i++)
        if (!strcmp(wide_formats[i - COUNT].name, name))
            return i;
    return -1;
}

/* Bytes of an element. */
EXPORT size_t mpicoll_size(int format)
{
    return format < COUNT ? formats[format].size : wide_formats[format - COUNT].size;
}

/* out = float32 of source, a narrow float; they do not overlap. */
EXPORT void mpicoll_widen(int format, const void *source, void *out, size_t count)
{
    formats[format].widen(source, out, count);
}

/* out, a narrow float, = source, float32, rounded; they do not overlap. */
EXPORT void mpicoll_narrow(int format, const void *source, void *out, size_t count)
{
    formats[format].narrow(source, out, count);
}

/* out = (sources[0] op sources[1] op ...) / divisor, from the left. There are n >= 1 sources; out
 * may be one of them and overlaps the others nowhere. */
EXPORT void mpicoll_combine(int format, int operation, const char *const *sources, size_t n,
                            char *out, size_t count, double divisor)
{
    (format < COUNT ? combine_narrow : combine_wide)(format, operation, sources, n, out, count,
                                                     divisor);
}
