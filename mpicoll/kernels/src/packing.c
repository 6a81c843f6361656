/* Copies separate blocks into one buffer and back, to run a list of small arrays as one call. */

#include "kernels.h"


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
