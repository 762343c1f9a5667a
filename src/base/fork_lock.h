/* base/fork_lock.h: the one lock of what a process shares: interned texts, and the table of runners. Depends on nothing.
 *
 * A fork waits until nobody holds it, so that a child never finds it locked by a thread that it does not have. Held
 * briefly, and never while another lock is taken. */
#ifndef OPAQ_BASE_FORK_LOCK_H
#define OPAQ_BASE_FORK_LOCK_H

void fork_lock(void);
void fork_unlock(void);

#endif
