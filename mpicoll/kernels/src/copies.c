/* Copies of blocks, and of separate blocks into one buffer and back.
 *
 * glibc's memcpy uses `rep movsb` from a few KiB on if the processor recommends it. On AMD Zen 3 and
 * Zen 4 this instruction is up to 20 times slower than a loop if the destination begins less than a
 * cache line after the source, modulo a page (glibc bug 30994): arrays of NumPy, at 16 bytes from a
 * line, and slots, at 0. */

#include "kernels.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Minimum size of a copy by a loop; below, glibc's memcpy does not use the instruction. */
enum { LOOP_MIN_BYTES = 2048 };

/* A vector unit's width, or a multiple of it. */
typedef char vector __attribute__((vector_size(32), may_alias));
typedef char unaligned_vector __attribute__((vector_size(32), aligned(1), may_alias));
enum { UNROLLED = 4 };

VECTORISED static void copy_vectors(vector *into, const unaligned_vector *from, size_t count)
{
    for (; count; count -= UNROLLED, into += UNROLLED, from += UNROLLED) {
        const vector a = from[0], b = from[1], c = from[2], d = from[3];
        into[0] = a, into[1] = b, into[2] = c, into[3] = d;
    }
}

void mpicoll_copy(char *into, const char *from, size_t size)
{
    if (size >= LOOP_MIN_BYTES) {
        const size_t before = (size_t)(-(uintptr_t)into % sizeof(vector));
        const size_t count = (size - before) / sizeof(vector) / UNROLLED * UNROLLED;
        memcpy(into, from, before);
        copy_vectors((vector *)(into + before), (const unaligned_vector *)(from + before), count);
        const size_t done = before + count * sizeof(vector);
        into += done, from += done, size -= done;
    }
    memcpy(into, from, size);
}

void mpicoll_copy_past_caches(char *into, const char *from, size_t size)
{
#ifdef __SSE2__
    enum { LINE = 64 };
    const size_t before = (size_t)(-(uintptr_t)into % sizeof(__m128i));
    if (size > before + LINE) {
        memcpy(into, from, before);
        for (into += before, from += before, size -= before; size >= LINE;
             into += LINE, from += LINE, size -= LINE) {
            const __m128i *line = (const __m128i *)from;
            const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_stream_si128((__m128i *)into, a);
            _mm_stream_si128((__m128i *)into + 1, b);
            _mm_stream_si128((__m128i *)into + 2, c);
            _mm_stream_si128((__m128i *)into + 3, d);
        }
        _mm_sfence(); /* non-temporal stores are not ordered by themselves */
    }
#endif
    mpicoll_copy(into, from, size);
}

/* Copies line by line and row by row: the row's block of every array into consecutive memory.
 *
 * arrays: `lines` lines of `n` addresses; array k of each line has `rows` blocks of counts[k]
 *         elements.
 * size:   size of an element in bytes. */
EXPORT void mpicoll_pack(const char *const *arrays, const size_t *counts, size_t n, size_t lines,
                         size_t rows, size_t size, char *into)
{
    for (size_t line = 0; line < lines; line++, arrays += n)
        for (size_t row = 0; row < rows; row++)
            for (size_t k = 0; k < n; k++) {
                mpicoll_copy(into, arrays[k] + row * counts[k] * size, counts[k] * size);
                into += counts[k] * size;
            }
}

/* The reverse of mpicoll_pack. */
EXPORT void mpicoll_unpack(char *const *arrays, const size_t *counts, size_t n, size_t lines,
                           size_t rows, size_t size, const char *from)
{
    for (size_t line = 0; line < lines; line++, arrays += n)
        for (size_t row = 0; row < rows; row++)
            for (size_t k = 0; k < n; k++) {
                mpicoll_copy(arrays[k] + row * counts[k] * size, from, counts[k] * size);
                from += counts[k] * size;
            }
}
