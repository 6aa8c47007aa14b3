// SPDX-License-Identifier: Apache-2.0

package guard

const roleVariable = "HEADGATE_GUARD_TEST_ROLE"

func play(string) int { return 2 }
