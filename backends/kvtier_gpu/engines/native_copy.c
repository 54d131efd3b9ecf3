/* Many copies in one call: piece i is length[i] bytes from address from[i] to address to[i].
 *
 * Pieces of a page of KV cache or more go past the cache, as one long memmove would: who reads them next is a disk or a
 * device, and a line that is not fetched before it is written is a third of the traffic saved. No piece is long enough
 * for the C library to do so by itself. The pieces of a call must not overlap.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>

enum { LINE = 64, PAST_CACHE = 4096, AHEAD = 512 };

static void copy_past_cache(char *to, const char *from, size_t length)
{
    size_t head = -(uintptr_t)to % LINE;
    memcpy(to, from, head);
    to += head, from += head, length -= head;
    for (; length >= LINE; to += LINE, from += LINE, length -= LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA); /* beyond the end it is of no use and no harm */
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, length);
}
#endif

void kvtier_copy_scattered(size_t count, const uint64_t *to, const uint64_t *from, const uint64_t *length)
{
    for (size_t i = 0; i < count; i++) {
        char *target = (char *)(uintptr_t)to[i];
        const char *source = (const char *)(uintptr_t)from[i];
#if defined(__x86_64__)
        if (length[i] >= PAST_CACHE) {
            copy_past_cache(target, source, length[i]);
            continue;
        }
#endif
        memcpy(target, source, length[i]);
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
