/* base/tree.h - the one order in which contributions of slices are added (I1).
 *
 * The tree stands over slice numbers 0..S-1: a node of level k covers the slices
 * [m * 2^k, (m+1) * 2^k), cut off at S. Its sum is left + right; a child to which no slice
 * contributes is skipped, never added as 0. A trainer holds a contiguous run of slices and sums up
 * the maximal complete nodes of its run; whoever has all nodes finishes the tree. A node is named
 * by its first slice, its pos. */
#ifndef CHANTER_BASE_TREE_H
#define CHANTER_BASE_TREE_H

#include <stdint.h>

enum { TREE_MAX_SLICES = 64, TREE_MAX_NODES = 12 }; /* nodes of one run: 2 * log2(S) at most */

struct tree_node { uint8_t pos, end; }; /* slices [pos, end) */

/* First slice of trainer t's run, of n_trainers over S slices; the run ends where t+1's starts. */
uint32_t tree_run_start(uint32_t t, uint32_t n_trainers, uint32_t S);
/* Maximal complete nodes of the run [lo, hi), ascending; returns how many. */
uint32_t tree_nodes(uint32_t lo, uint32_t hi, uint32_t S, struct tree_node out[TREE_MAX_NODES]);
/* Mask of the slices of a node. */
uint64_t tree_node_mask(struct tree_node node);
/* Contributions at ascending distinct positions pos[0..n), n >= 2: the first of the right child's
 * contributions at the lowest node that covers them all. Sum = sum[0..split) + sum[split..n). */
uint32_t tree_split(const uint8_t *pos, uint32_t n);

#endif
