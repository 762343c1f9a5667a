/* base/fork_lock.h: the lock of process-wide state: interned texts and the table of runners. Depends on
 * nothing.
 *
 * A fork waits until the lock is free, so that a child never inherits it locked by a thread that it does not
 * have. Held briefly, and never while taking another lock. */
#ifndef OPAQ_BASE_FORK_LOCK_H
#define OPAQ_BASE_FORK_LOCK_H

void fork_lock(void);
void fork_unlock(void);

#endif
