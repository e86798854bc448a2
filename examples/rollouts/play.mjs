// Plays attempts of a run with an agent of its own, in another language and over plain HTTP.
//
//   node examples/rollouts/play.mjs RUN_FOLDER [CONCURRENT]
//
// This agent asks the policy once and scores the answer itself: it is the place of yours.
import { readFileSync } from "node:fs";

const folder = process.argv[2];
const url = readFileSync(`${folder}/rollouts_url`, "utf8").trim();
const key = readFileSync(`${folder}/rollouts_key`, "utf8").trim();

async function post(address, bearer, body) {
  const reply = await fetch(address, {
    method: "POST",
    headers: { authorization: `Bearer ${bearer}`, "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  const text = await reply.text();
  if (!reply.ok) throw new Error(`${address}: ${reply.status} ${text}`);
  return JSON.parse(text);
}

async function play(attempt) {
  const messages = [{ role: "user", content: attempt.task.instruction }];
  const body = { model: attempt.model, messages };
  const reply = await post(`${attempt.base_url}/chat/completions`, attempt.api_key, body);
  const text = reply.choices[0].message.content ?? "";
  // Any number from 0 to 1: attempts of one group are compared with each other.
  return Math.min(1, text.length / 200);
}

async function worker() {
  for (;;) {
    try {
      const { attempt } = await post(`${url}/v1/rollouts/take`, key, { wait_s: 20 });
      if (attempt === null) continue;
      try {
        const reward = await play(attempt);
        await post(`${attempt.url}/end`, attempt.api_key, { reward });
      } catch (error) {
        console.error(`${attempt.rollout_id} is lost: ${error.message}`);
        await post(`${attempt.url}/end`, attempt.api_key, { outcome: "lost" });
      }
    } catch (error) {
      // The service restarts, or the run is over.
      console.error(error.message);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

await Promise.all(Array.from({ length: Number(process.argv[3] ?? 4) }, worker));
