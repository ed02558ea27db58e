#include "base/tree.h"

#include "base/check.h"

uint32_t tree_run_start(uint32_t t, uint32_t n_trainers, uint32_t S)
{
    return t * S / n_trainers;
}

uint32_t tree_nodes(uint32_t lo, uint32_t hi, uint32_t S, struct tree_node out[TREE_MAX_NODES])
{
    uint32_t n = 0;
    while (lo < hi) {
        uint32_t size = 1;
        for (uint32_t twice = 2; lo % twice == 0 && size < S; twice *= 2) {
            uint32_t end = lo + twice < S ? lo + twice : S;
            if (end > hi) break;
            size = twice;
        }
        uint32_t end = lo + size < S ? lo + size : S;
        CHECK(n < TREE_MAX_NODES, "a run has at most 2 log2(S) maximal nodes");
        out[n++] = (struct tree_node){(uint8_t)lo, (uint8_t)end};
        lo = end;
    }
    return n;
}

uint64_t tree_node_mask(struct tree_node node)
{
    uint64_t below_end = node.end == 64 ? ~UINT64_C(0) : (UINT64_C(1) << node.end) - 1;
    return below_end & ~((UINT64_C(1) << node.pos) - 1);
}

uint32_t tree_split(const uint8_t *pos, uint32_t n)
{
    /* The highest bit in which first and last differ is the level of their lowest common node;
     * the right child is where that bit is set. */
    uint32_t diff = (uint32_t)(pos[0] ^ pos[n - 1]);
    uint32_t bit = 1u << (31 - __builtin_clz(diff));
    uint32_t i = 1;
    while ((pos[i] & bit) == (pos[0] & bit)) i++;
    return i;
}
