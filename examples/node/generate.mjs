// penstock from Node.js: the npm package `redis`, and nothing of penstock's.
//
//   npm ci && REDIS_URL=redis://localhost:6379 node generate.mjs "The list type"
//
// With TENANT=acme it uses that tenant's own ingress stream, as a client must that an ACL confines.

import { createClient } from "redis";
import { randomUUID } from "node:crypto";

const { REDIS_URL = "redis://localhost:6379", TENANT, SHARD = "demo.0" } = process.env;
const prompt = process.argv[2] ?? "The list type";
const prefix = `ps:{${SHARD}}:`;

// An id of our own makes the XADD repeatable: however often it arrives, the request runs once.
const id = (TENANT ? `${TENANT}.` : "") + randomUUID();

const redis = createClient({ url: REDIS_URL });
redis.on("error", (error) => console.error(String(error)));
await redis.connect();

await redis.xAdd(prefix + (TENANT ? `ingress:${TENANT}` : "ingress"), "*", {
  id,
  prompt,
  max_tokens: "64",
  lane: "critical",
  stop_json: JSON.stringify(["\n\n"]),
  answer: "json",
});

// The log is the whole answer, kept for a while after the end: a reader that comes late or comes back
// reads on from the last entry seen. (For less delay with many requests: SUBSCRIBE to events:<id>.)
let last = "0-0";
let end;
while (!end) {
  const streams = await redis.xRead({ key: `${prefix}log:${id}`, id: last }, { BLOCK: 5000 });
  for (const entry of streams?.[0].messages ?? []) {
    last = entry.id;
    const event = JSON.parse(entry.message.chunk ?? entry.message.end);
    if (event.end) end = event;
    else process.stdout.write(event.text);
  }
}

console.log();
console.error(`${end.state} (${end.reason}) ${end.message}`);
await redis.close();
process.exitCode = end.state === "completed" ? 0 : 1;
