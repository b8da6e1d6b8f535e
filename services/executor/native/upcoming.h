/* What attention reads next comes from memory while it computes. */
#ifndef RZ_UPCOMING_H
#define RZ_UPCOMING_H

#include "vector.h"

enum { PLANES_OF_ROUND = 128 };

/* The keys and values of the round after the next (at the end: of the next part) are asked for while this round's are
 * worked on, a few lines at a time: blocks lie anywhere in memory, and what is asked for all at once comes late. */
typedef struct {
    const char *planes[PLANES_OF_ROUND]; /* one head of one block: keys or values */
    long bytes;                          /* of a plane, at most */
    int count, next;
    long at;                             /* in the next plane */
} rz_upcoming;

RZ_INLINE void pull(rz_upcoming *ahead, int lines)
{
    if (ahead->next >= ahead->count)
        return;
    const char *from = ahead->planes[ahead->next] + ahead->at;
    for (int line = 0; line < lines; line++)
        __builtin_prefetch(from + line * 64, 0, 2); /* on to the second cache: the first is full of what is packed */
    ahead->at += lines * 64;
    if (ahead->at >= ahead->bytes) {
        ahead->at = 0;
        ahead->next++;
    }
}

#endif
